"""Counts of bench_gpu_identity.py for two answers that differ."""

from __future__ import annotations

import pytest
from bench_gpu_identity import TIE_GAP, Answer, compare


def answer(tokens, gap=0.1, pair=(1, 2)):
    return Answer(tokens, [gap] * len(tokens), [frozenset(pair)] * len(tokens))


@pytest.mark.parametrize(
    ("ours", "counts"),
    [
        (answer([1, 1]), (0, 0, 0)),
        (answer([1, 2]), (1, 0, 0)),
        (answer([1, 2], gap=TIE_GAP + 0.01), (1, 1, 0)),
        (answer([1, 3], pair=(1, 3)), (1, 0, 1)),
    ],
    ids=["equal", "tie", "beyond a tie", "other tokens"],
)
def test_differences_are_counted_by_kind(ours, counts):
    figures = {f.name: f.value for f in compare("x", [answer([1, 1]), ours], [answer([1, 1])] * 2)}
    kinds = ("x", "x.beyond_a_tie", "x.other_pairs")
    assert tuple(figures[name] for name in kinds) == counts
