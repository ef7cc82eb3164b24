"""Order in which --kvspec-compressor auto takes methods."""

from __future__ import annotations

from sglang_kvspec.planning.compressor_choice import ALL_TOKENS, Measured, best_first
from sglang_kvspec.planning.measured_compressors import DRAFT_LEN, MEASURED, PLACES


def method(scorer, shares, costs, budget=0.1):
    accepted = tuple(share * 12 for share in shares)
    return Measured(scorer, "uniform4", 4, budget, accepted, tuple(shares), tuple(costs))


def test_the_fewest_bytes_come_first_among_methods_that_keep_enough():
    cheap = method("cheap", (0.95, 0.9), (0.1, 0.3))
    dear = method("dear", (0.99, 0.99), (0.31, 0.31))
    close = method("close", (1.0, 0.89), (0.1, 0.1))
    poor = method("poor", (0.5, 1.0), (0.01, 0.01))
    dense = method(ALL_TOKENS, (1.0, 1.0), (1.0, 1.0), 1.0)
    assert best_first([poor, dear, dense, close, cheap]) == [cheap, dear, close, poor]


def test_of_equal_bytes_the_larger_acceptance_counts():
    weak = method("a", (0.91, 0.95), (0.211, 0.2))
    strong = method("b", (0.93, 0.93), (0.2, 0.212))
    assert best_first([weak, strong]) == [strong, weak]


def test_what_was_measured_has_a_number_for_every_place():
    assert PLACES
    for each in MEASURED:
        assert len(each.accepted) == len(each.vs_dense4) == len(each.bytes_vs_dense4) == len(PLACES)
        assert all(0 <= accepted <= DRAFT_LEN for accepted in each.accepted)
    assert best_first(MEASURED)
