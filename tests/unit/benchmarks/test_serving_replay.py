"""Replayed acceptance: the curve becomes probabilities, and the plugin draws from them."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving.arguments import parse_arguments
from serving.curve import Traces, matches, survival, write_curve, write_traces

from sglang_kvspec.planning.costs import AcceptanceCurve
from sglang_kvspec.runtime import spec_sampler

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MEANS = {1: 0.9, 2: 1.7, 4: 3.1, 8: 5.5}
TARGETS = list(range(100, 109))


@pytest.fixture
def replay():
    """A new copy of the plugin's module, loaded by its path, since no import path here contains
    it."""
    path = BENCHMARKS / "serving" / "replay" / "kvspec_replay.py"
    spec = importlib.util.spec_from_file_location("kvspec_replay", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_survival_sums_to_the_measured_means():
    found = survival(AcceptanceCurve.from_means(MEANS), 8)
    for draft_len, mean in MEANS.items():
        assert sum(found[:draft_len]) == pytest.approx(mean)
    assert all(before >= after for before, after in pairwise(found))


def test_survival_ends_where_the_curve_does():
    assert survival(AcceptanceCurve.from_means({1: 0.9, 2: 1.7}), 4) == pytest.approx(
        [0.9, 0.8, 0, 0]
    )


def test_noise_that_rises_is_cut_off():
    """Means of 0.5, then 0.8: a second draft cannot survive more often than the first."""
    assert survival(AcceptanceCurve.from_means({1: 0.5, 2: 1.3}), 2) == pytest.approx([0.5, 0.5])


def test_what_was_measured_makes_a_curve(tmp_path):
    path = tmp_path / "curve.json"
    source = write_curve(BENCHMARKS / "results" / "acceptance.json", "uniform4", path)
    found = json.loads(path.read_text())
    assert sum(found["survival"][:32]) == pytest.approx(27.23, abs=0.01)
    assert found["source"] == source
    assert "eval-31m" in source


def test_replay_accepts_as_often_as_the_curve_says(replay):
    probabilities = survival(AcceptanceCurve.from_means(MEANS), 8)
    accept = replay.Replay(probabilities, seed=1).accept_matching
    for draft_len in (1, 4, 8):
        drafts, targets = list(range(draft_len)), TARGETS[: draft_len + 1]
        kept = [len(accept(drafts, targets)) - 1 for _ in range(4000)]
        assert sum(kept) / len(kept) == pytest.approx(sum(probabilities[:draft_len]), rel=0.03)


def test_replay_emits_drafts_and_then_the_target(replay):
    assert replay.Replay([1.0, 1.0, 0.0], seed=0).accept_matching([1, 2, 3], TARGETS[:4]) == [
        1,
        2,
        102,
    ]
    assert replay.Replay([1.0], seed=0).accept_matching([], [7]) == [7]
    assert replay.Replay([0.0], seed=0).accept_matching([1], [7, 8]) == [7]


def test_ranks_with_one_seed_agree(replay):
    one, other = (replay.Replay([0.9, 0.5, 0.2], seed=3) for _ in range(2))
    draws = [(r.accept_matching([1, 2, 3], [4, 5, 6, 7])) for _ in range(50) for r in (one, other)]
    assert draws[::2] == draws[1::2]


@pytest.mark.parametrize("missing", ["KVSPEC_REPLAY_CURVE", "SGLANG_KVSPEC"])
def test_nothing_is_replaced_unless_asked(replay, monkeypatch, missing):
    monkeypatch.setenv("KVSPEC_REPLAY_CURVE", "/no/such/file")
    monkeypatch.setenv("SGLANG_KVSPEC", "{}")
    monkeypatch.delenv(missing)
    before = spec_sampler.accept_matching
    replay.register()
    assert spec_sampler.accept_matching is before


def test_the_choosers_rule_is_replaced(replay, monkeypatch, tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({"survival": [0.0]}))
    monkeypatch.setenv("KVSPEC_REPLAY_CURVE", str(path))
    monkeypatch.setenv("SGLANG_KVSPEC", "{}")
    monkeypatch.setattr(spec_sampler, "accept_matching", spec_sampler.accept_matching)
    replay.register()
    assert spec_sampler.accept_matching([5], [5, 6]) == [5]
    assert spec_sampler.accept_matching([5], [4, 6]) == [4]


def test_traces_are_replayed_by_budget_and_request(replay, tmp_path):
    views = tmp_path / "views.json"
    raw = {"all": [[16, 3], [2]], "pages:0.1:4": [[5], [0, 16]], "recent:0.1": [[9], [9]]}
    raw = {name: [{"accepted": each} for each in rounds] for name, rounds in raw.items()}
    settings = {"model": "m", "prompts": 2, "prompt_len": 9, "draft_len": 16, "raw": raw}
    views.write_text(json.dumps({"settings": settings}))
    source = write_traces(Traces(views), tmp_path / "traces.json")
    found = json.loads((tmp_path / "traces.json").read_text())
    assert "2 prompts of 9 tokens" in source == found["source"]
    accept = replay.TraceReplay({float(k): v for k, v in found["traces"].items()}).accept
    a, b = (SimpleNamespace(rid=name, budget=1.0, drafts=list(range(8))) for name in "ab")
    targets = list(range(100, 109))

    def kept(state):
        tokens = accept(state, targets, len(targets))
        assert tokens[-1] == targets[len(tokens) - 1]
        return len(tokens) - 1

    # 17 tokens of a full round, then 3 drafts and a rejection: rounds of 8 drafts and one token.
    assert [kept(a), kept(a), kept(a)] == [8, 8, 2]
    assert [kept(b), kept(b)] == [2, 2]
    a.budget = 0.1
    assert kept(a) == 5 - 21 % 6
    b.budget = 0.2
    with pytest.raises(ValueError, match=r"budget 0.2 \(recorded: 0.1, 1.0\)"):
        kept(b)
    assert accept(b, targets, 0) == []


def test_traces_of_a_scorer_are_those_over_four_bits(tmp_path):
    raw = {
        "all.uniform4_4bit": [[16]],
        "all.plain": [[9]],
        "streaming.uniform4_4bit.5pct": [[1]],
        "streaming.uniform4_4bit.20pct": [[2]],
        "streaming.uniform4_2bit.20pct": [[9]],
        "snapkv.uniform4_4bit.20pct": [[9]],
    }
    raw = {name: [{"accepted": each} for each in rounds] for name, rounds in raw.items()}
    settings = {"model": "m", "prompts": 1, "prompt_len": 9, "draft_len": 16, "raw": raw}
    path = tmp_path / "study.json"
    path.write_text(json.dumps({"settings": settings}))
    source = write_traces(Traces.of(f"{path}:streaming"), tmp_path / "traces.json")
    assert source.startswith("traces of study.json:streaming (m, ")
    found = json.loads((tmp_path / "traces.json").read_text())["traces"]
    assert found == {"1.0": ["1" * 17], "0.05": ["10"], "0.2": ["110"]}
    with pytest.raises(ValueError, match=r"study\.json has no traces of snapkv2"):
        write_traces(Traces.of(f"{path}:snapkv2"), tmp_path / "none.json")


def test_a_trace_tells_right_drafts_from_wrong_ones():
    assert matches([2, 0, 4, 1], 4) == "110" + "0" + "11111" + "10"


def arguments(monkeypatch, path, *more):
    given = ["bench_serving.py", "--points", "8b:4k:4", "--traces", str(path), *more]
    monkeypatch.setattr(sys, "argv", given)
    return parse_arguments("about")


def test_traces_that_lack_a_budget_are_refused_before_a_server_starts(
    monkeypatch, capsys, tmp_path
):
    path = tmp_path / "views.json"
    path.write_text(
        json.dumps({"settings": {"raw": {"all": [], "pages:0.05": [], "pages:0.1": []}}})
    )
    with pytest.raises(SystemExit):
        arguments(monkeypatch, path, "--systems", "bf16", "exact-w4")
    told = " ".join(capsys.readouterr().err.split())
    assert "no traces at the draft budgets 0.2, which exact-w4 may choose" in told
    # Systems that choose nothing.
    arguments(monkeypatch, path, "--systems", "bf16", "exact-all")
    named = "--kvspec-args=--kvspec-draft-budget=0.1"
    arguments(monkeypatch, path, "--systems", "exact-w4", named)
    arguments(monkeypatch, f"{path}:streaming", "--systems", "exact")
    budgets = {"all": [], "pages:0.05:4": [], "pages:0.1:4": [], "pages:0.2:4": []}
    path.write_text(json.dumps({"settings": {"raw": budgets}}))
    arguments(monkeypatch, path, "--systems", "exact-w4")
