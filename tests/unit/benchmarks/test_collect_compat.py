"""Figures of collect_compat.py."""

from __future__ import annotations

import collect_compat


def row(name, value):
    return {"name": name, "value": value, "unit": "x", "spread": None, "baseline": None}


def values(figures):
    return {each.name: each.value for each in figures}


def test_ratios_of_both_codecs_are_left_out():
    rows = [
        row("attn.draft.16x32768.vs_flashinfer_bf16", 2.5),
        row("attn.draft.16x32768.log4.vs_flashinfer_bf16", 2.0),
        row("attn.verify16.16x32768.vs_flashinfer_bf16", 0.9),
        row("attn.draft2bit.16x32768.vs_flashinfer_bf16", 3.0),
    ]
    expected = {"triton.draft.vs_flashinfer": 2.5, "triton.verify16.vs_flashinfer": 0.9}
    assert values(collect_compat.attention_figures(rows)) == expected


def test_answers_of_all_targets_and_reports_are_counted_together():
    rows = [
        row("lossless.exact.answers", 100),
        row("lossless.exact.mismatches", 0),
        row("lossless.int8.answers", 40),
        row("lossless.int8.mismatches", 1),
        row("gpu_tests.passed", 60),
        row("gpu_tests.failed", 1),
        row("gpu_tests.passed", 10),
    ]
    found = collect_compat.sums(rows, collect_compat.ANSWERS, "triton.identity", "answers")
    assert values(found) == {"triton.identity.answers": 140, "triton.identity.mismatches": 1}
    assert [each.baseline for each in found] == [None, 0]
    tests = collect_compat.sums(rows, collect_compat.TESTS, "triton.tests", "tests")
    assert values(tests) == {"triton.tests.passed": 70, "triton.tests.failed": 1}


def test_rates_are_those_over_plain_sglang():
    rows = [row("serve.8b.32k.bs16.exact.vs_bf16", 1.6), row("serve.8b.32k.bs16.exact.accepted", 9)]
    assert values(collect_compat.serving_figures(rows)) == {"triton.serve.8b.32k.bs16.exact": 1.6}
