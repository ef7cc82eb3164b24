"""Traces of rounds: the calls that are recorded, and their counts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from statistics import median

import pytest
from round_trace.counts import (
    Counts,
    Round,
    call_tree,
    half_quartile_range,
    median_round,
    over_rounds,
    read_rounds,
)

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WORKER = """
import functools
from contextlib import contextmanager

from traced import helper

class Worker:
    def __init__(self, model, requests):
        self.model, self.requests = model, requests

    def forward_batch_generation(self, batch):
        with self.whole():
            total = sum(helper.numbers(2))
        return self.size + total + self.model()

    @contextmanager
    def whole(self):
        yield

    @property
    def size(self):
        return functools.reduce(lambda a, b: helper.add(a, b), [1, 2])
"""
HELPER = """
def numbers(count):
    yield from range(count)

def add(a, b):
    return a + b

def attend():
    return add(1, 1)
"""
# Calls of forward_batch_generation, in order: name, caller, through a library, in the model.
CALLS = [
    ("Worker.forward_batch_generation", None, False, False),
    ("Worker.whole", "Worker.forward_batch_generation", True, False),
    ("numbers", "Worker.forward_batch_generation", False, False),
    ("numbers", "Worker.forward_batch_generation", False, False),
    ("numbers", "Worker.forward_batch_generation", False, False),
    # contextlib resumes the generator.
    ("Worker.whole", "Worker.forward_batch_generation", True, False),
    ("Worker.size", "Worker.forward_batch_generation", False, False),
    ("Worker.size.<locals>.<lambda>", "Worker.size", False, False),
    ("add", "Worker.size.<locals>.<lambda>", False, False),
    ("attend", "Worker.forward_batch_generation", True, True),
    ("add", "attend", False, True),
]


@pytest.fixture
def plugin():
    """A new copy of the plugin's module, loaded by its path, since no import path here contains
    it."""
    path = BENCHMARKS / "round_trace" / "plugin" / "kvspec_round_trace.py"
    spec = importlib.util.spec_from_file_location("kvspec_round_trace", path)
    module = importlib.util.module_from_spec(spec)
    # The dataclass decorator looks up its module in sys.modules.
    sys.modules["kvspec_round_trace"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["kvspec_round_trace"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A checkout with a worker and a helper in two files."""
    package = tmp_path / "tree" / "traced"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "worker.py").write_text(WORKER)
    (package / "helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(package.parent)
    yield package.parent
    for name in [name for name in sys.modules if name.partition(".")[0] == "traced"]:
        del sys.modules[name]


class Mode:
    def __init__(self, *, is_decode: bool) -> None:
        self._is_decode = is_decode

    def is_decode(self) -> bool:
        return self._is_decode


class Batch:
    def __init__(self, num_requests: int, *, is_decode: bool = True) -> None:
        self.reqs = [None] * num_requests
        self.forward_mode = Mode(is_decode=is_decode)


@pytest.fixture
def traced(plugin, tree, tmp_path):
    """forward_batch_generation of a worker that is traced for two rounds after a warm-up round."""
    from traced import helper, worker

    out = tmp_path / "rounds.json"
    settings = plugin.Settings(str(tree), str(out), requests=2, warm_up=1, rounds=2)
    recorder = plugin.CallRecorder([tree / "traced"], tree)

    def forward():
        return helper.attend()

    one = worker.Worker(recorder.model_forward(forward), 2)
    trace = plugin.RoundTrace(settings, recorder)
    return trace.traced(one.forward_batch_generation), out


def rounds_of(traced):
    run, out = traced
    for _ in range(3):
        run(Batch(2))
    return read_rounds(out)


def test_calls_in_order(traced):
    first, second = rounds_of(traced)
    assert [
        (
            call.callee.name,
            None if call.caller is None else call.caller.name,
            call.through_library,
            call.in_model,
        )
        for call in first.calls
    ] == CALLS
    assert first == second
    assert first.model_forwards == 1


def test_counts(traced):
    one = rounds_of(traced)[0]
    assert one.outside_model() == Counts(
        calls=8,
        direct_calls=6,
        # `numbers` three times, and `add`.
        cross_file_calls=4,
        edges=5,
        # Lines of worker, numbers, worker and add.
        file_changes=3,
        files=2,
    )
    assert one.inside_model() == Counts(2, 1, 1, 2, 0, 1)


def test_only_steady_rounds_are_recorded(traced):
    run, out = traced
    for batch in [Batch(1), Batch(2, is_decode=False), Batch(2), Batch(2), Batch(3)]:
        run(batch)
    assert not out.exists()
    run(Batch(2))
    assert len(json.loads(out.read_text())["rounds"]) == 2
    written = out.read_text()
    run(Batch(2))
    assert out.read_text() == written


def test_a_round_that_fails_ends_its_trace(plugin, tree):
    def fail(batch):
        raise RuntimeError("out of pages")

    settings = plugin.Settings(str(tree), "never", requests=1, warm_up=0, rounds=1)
    trace = plugin.RoundTrace(settings, plugin.CallRecorder([tree], tree))
    with pytest.raises(RuntimeError, match="out of pages"):
        trace.traced(fail)(Batch(1))
    assert sys.getprofile() is None


def test_the_calls_as_a_tree(traced):
    lines = call_tree(rounds_of(traced)[0]).splitlines()
    assert [line.partition("  traced/")[0] for line in lines] == [
        "Worker.forward_batch_generation",
        "  Worker.whole",
        "  numbers",
        "  numbers",
        "  numbers",
        "  Worker.whole",
        "  Worker.size",
        "    Worker.size.<locals>.<lambda>",
        "      add",
        "  [model] attend",
        "    [model] add",
    ]
    assert lines[0].endswith("traced/worker.py:11")


def test_a_median_round_is_one_of_the_rounds(traced):
    rounds = rounds_of(traced)
    longest = type(rounds[0])(rounds[0].calls + rounds[0].calls[1:], 2)
    assert median_round([longest, *rounds]) in rounds


def test_statistics_over_rounds(traced):
    first = rounds_of(traced)[0]
    rounds = [Round(first.calls[:size], 1) for size in (1, 2, 3, 4, 5)]
    assert over_rounds(rounds, Round.outside_model, median).calls == 2
    assert over_rounds(rounds, Round.outside_model, half_quartile_range).calls == 1
