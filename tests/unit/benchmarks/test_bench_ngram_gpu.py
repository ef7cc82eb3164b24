"""Figures of n-grams on a GPU: ratios of pairs, and what explains them."""

from __future__ import annotations

import pytest
from bench_ngram_gpu import COUNTS, Measured, Pass


def counted(*values):
    return dict(zip(COUNTS, values, strict=True))


@pytest.fixture
def measured():
    found = Measured("m", "other", 4)
    for rate, ours in ((100.0, 120.0), (200.0, 180.0), (50.0, 50.0)):
        found.passes["self"].append(Pass(rate, [[1, 2]], counted(0, 0, 0, 0), {}))
        times_ms = {"4": {"ordinary": 1.5}, "1": {"ordinary": 1.0}}
        found.passes["ngram"].append(Pass(ours, [[1, 2]], counted(100, 25, 75, 50), times_ms))
    return found


def test_figures_tell_how_often_and_how_much_was_proposed(measured):
    values = {figure.name: figure.value for figure in measured.figures(is_main=True)}
    assert values["ngram.vs_self.other"] == values["ngram.vs_self.other.m.c4"] == 1.0
    assert values["ngram.tokens_per_step.other"] == 1.5
    assert values["ngram.proposing_share.other.m.c4"] == 0.25
    assert values["ngram.mean_proposed.other.m.c4"] == 3.0
    assert values["ngram.step_ms.ordinary.other.m.c4"] == 1.5
    assert values["ngram.mismatches.other.m.c4"] == 0


def test_a_server_that_proposed_nothing_has_no_mean(measured):
    for each in measured.passes["ngram"]:
        each.counts.update(proposing=0, proposed=0, kept=0)
    values = {figure.name: figure.value for figure in measured.figures(is_main=False)}
    assert values["ngram.tokens_per_step.other.m.c4"] == 1.0
    assert values["ngram.proposing_share.other.m.c4"] == 0.0
    assert "ngram.mean_proposed.other.m.c4" not in values
