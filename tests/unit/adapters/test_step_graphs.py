"""The choice between captured graphs of a step."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_kvspec.adapters import step_graphs
from sglang_kvspec.adapters.step_graphs import StepGraphs

# Torch's name of the library that is tried besides its own choice.
OTHER = torch._C._BlasBackend.Cublaslt


def library():
    return torch.backends.cuda.preferred_blas_library()


class FakeForward:
    """Graphs that take seconds(number of rows, whether the other library was set at capture)."""

    def __init__(self, seconds):
        self.seconds, self.now = seconds, 0.0
        self.logits = torch.zeros(8, 1)
        self.own = library()
        self.reads_copies = False

    @contextmanager
    def copies(self):
        self.reads_copies = True
        yield
        self.reads_copies = False

    def capture(self, rows, num_tokens, stream, warm_ups):
        assert library() in (self.own, OTHER)
        is_other = library() == OTHER

        def replay():
            self.now += self.seconds(num_tokens, is_other)

        return SimpleNamespace(replay=replay, is_other=is_other, reads_copies=self.reads_copies)


@pytest.fixture
def captured(monkeypatch):
    def make(seconds, most_rows=None, **settings):
        forward = FakeForward(seconds)
        if most_rows is not None:
            settings["weights"] = SimpleNamespace(most_rows=most_rows, in_force=forward.copies)
        monkeypatch.setattr(
            step_graphs, "graph_capture", lambda: nullcontext(SimpleNamespace(stream=None))
        )
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(step_graphs.time, "perf_counter", lambda: forward.now)
        attention = SimpleNamespace(begin_steps=lambda *_: None, end_captured=lambda: None)
        rows = SimpleNamespace(max_batch=8, clear=lambda: None)
        step = SimpleNamespace(plan=lambda rows: None)
        graphs = StepGraphs(forward, attention, rows, lambda rows, batch: step, **settings)
        assert library() == forward.own
        return graphs

    return make


def used(graphs):
    return {size: graph.is_other for size, graph in graphs._graphs.items()}


def test_each_size_takes_the_faster_library(captured):
    def seconds(num_rows, is_other):
        return num_rows + (0.5 if is_other == (num_rows < 4) else 0.0)

    graphs = captured(seconds, may_use_other_blas=True)
    assert used(graphs) == {1: False, 2: False, 4: True, 8: True}
    assert graphs.time_empty_step() == pytest.approx(1.0)


def test_equally_fast_libraries_leave_the_choice_to_torch(captured):
    graphs = captured(lambda num_rows, is_other: 1.0, may_use_other_blas=True)
    assert not any(used(graphs).values())


def test_target_steps_use_the_library_that_torch_is_set_to(captured):
    graphs = captured(lambda num_rows, is_other: 1.0 - is_other / 2)
    assert not any(used(graphs).values())


@pytest.mark.parametrize("may_use_other_blas", [False, True])
def test_few_rows_multiply_with_copies(captured, may_use_other_blas):
    graphs = captured(
        lambda num_rows, is_other: 1.0, most_rows=4, may_use_other_blas=may_use_other_blas
    )
    copies = {size: graph.reads_copies for size, graph in graphs._graphs.items()}
    assert copies == {1: True, 2: True, 4: True, 8: False}
