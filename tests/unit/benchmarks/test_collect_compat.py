"""Figures of collect_compat.py."""

from __future__ import annotations

from dataclasses import asdict

import collect_compat
import pytest
from check_compat import Outcome


def row(name, value):
    return {"name": name, "value": value, "unit": "x", "spread": None, "baseline": None}


def values(figures):
    return {each.name: each.value for each in figures}


def result(commit, *releases, failed=()):
    found = [Outcome(each, 2, failed, 0, 8, 0, 60.0, {}) for each in releases]
    raw = [asdict(each) for each in found]
    return {"commit": commit, "settings": {"tests": ["a"], "raw": raw}}


def test_the_last_run_of_a_release_counts():
    first = result("c", "0.5.20", "0.5.9", failed=("tests.a.fails",))
    found = values(collect_compat.releases_figures([first, result("c", "0.5.9")]))
    assert (found["compat.releases"], found["compat.failed"]) == (1, 1)
    per_release = [name for name in found if name.endswith(".passed")]
    assert per_release == ["compat.0.5.9.passed", "compat.0.5.20.passed"]


def test_releases_of_two_commits_are_refused():
    with pytest.raises(ValueError, match="several commits: c, d"):
        collect_compat.releases_figures([result("d", "0.5.17"), result("c", "0.5.18")])


def test_results_that_do_not_compare_are_refused():
    other = result("c", "0.5.18")
    other["settings"]["tests"] = ["a", "b"]
    with pytest.raises(ValueError, match="of different tests"):
        collect_compat.releases_figures([result("c", "0.5.17"), other])
    with pytest.raises(ValueError, match="of trees with changes"):
        collect_compat.releases_figures([result("c-dirty", "0.5.17"), result("c-dirty", "0.5.18")])


def test_ratios_of_both_codecs_are_left_out():
    rows = [
        row("attn.draft.16x32768.vs_flashinfer_bf16", 2.5),
        row("attn.draft.16x32768.log4.vs_flashinfer_bf16", 2.0),
        row("attn.verify16.16x32768.vs_flashinfer_bf16", 0.9),
        row("attn.draft2bit.16x32768.vs_flashinfer_bf16", 3.0),
    ]
    expected = {"triton.draft.vs_flashinfer": 2.5, "triton.verify16.vs_flashinfer": 0.9}
    assert values(collect_compat.attention_figures(rows)) == expected


def test_a_test_of_several_runs_counts_once():
    runs = [
        {"a": "passed", "b": "failed", "c": "skipped"},
        {"a": "passed", "b": "passed", "d": "passed"},
    ]
    found = collect_compat.tests_figures(runs)
    assert values(found) == {"triton.tests.passed": 2, "triton.tests.failed": 1}
    assert [each.baseline for each in found] == [None, 0]


def test_rates_are_those_over_plain_sglang():
    rows = [row("serve.8b.32k.bs16.exact.vs_bf16", 1.6), row("serve.8b.32k.bs16.exact.accepted", 9)]
    assert values(collect_compat.serving_figures(rows)) == {"triton.serve.8b.32k.bs16.exact": 1.6}
