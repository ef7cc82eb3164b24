"""Counts of bench_seeded.py, and its refusal of answers that show nothing."""

from __future__ import annotations

import bench_seeded
import pytest


def cases(*answers):
    return {"top_k": [list(each) for each in answers], "regex": [[9, 8], [7]]}


def test_answers_that_differ_are_counted_by_case():
    off = cases((1, 2, 3), (4, 5, 6))
    figures = bench_seeded.figures_of(off, cases((1, 2, 3), (4, 5, 7)), accepted=3)
    values = {figure.name: figure.value for figure in figures}
    assert values["lossless.seeded.answers"] == 4
    assert values["lossless.seeded.mismatches"] == 1
    assert values["lossless.seeded.top_k.mismatches"] == 1
    assert values["lossless.seeded.regex.mismatches"] == 0


def test_an_answer_that_ends_early_differs():
    figures = bench_seeded.figures_of(cases((1, 2), (3, 4)), cases((1,), (3, 4)), accepted=1)
    assert figures[0].value == 1


@pytest.mark.parametrize(("answers", "accepted"), [(((1, 2), (3, 4)), 0), (((9, 8), (9, 8)), 5)])
def test_answers_that_show_nothing_are_refused(answers, accepted):
    same = {"top_k": [list(each) for each in answers], "regex": [[9, 8], [9, 8]]}
    found = same if accepted else cases(*answers)
    with pytest.raises(ValueError, match="show nothing"):
        bench_seeded.figures_of(found, found, accepted)
