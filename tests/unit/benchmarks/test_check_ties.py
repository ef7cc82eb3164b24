"""Which differing answers part at a tie of fp32."""

from __future__ import annotations

import check_ties
import pytest


@pytest.mark.parametrize(
    ("gap", "noise", "is_tie"),
    [
        (2e-6, 1e-6, True),
        (2.1e-6, 1e-6, False),
        (0.0, 0.0, True),
        (1e-6, 0.0, False),
        # Noise that no order of summation explains makes no tie.
        (1e-3, 1.0, False),
    ],
)
def test_a_tie_is_closer_than_the_noise_of_both_tokens(gap, noise, is_tie):
    assert check_ties.is_tie(gap, noise) == is_tie


def test_noise_is_the_largest_difference_of_a_token_that_both_report():
    one = [{1: -1.0, 2: -2.0}, {3: -0.5}]
    other = [{1: -1.5, 4: -9.0}, {3: -0.75}]
    assert check_ties.noise_of(one, other) == 0.5
    assert check_ties.noise_of([], []) == 0.0


def test_a_token_that_a_server_does_not_rank_makes_no_tie():
    assert check_ties.gap_of({1: -1.0, 2: -1.5}, 1, 2) == 0.5
    with pytest.raises(ValueError, match="token 3 is not among the 5 best"):
        check_ties.gap_of({1: -1.0, 2: -1.5}, 1, 3)


def test_each_place_is_measured_once():
    where = {"task": "a.py[:9]", "position": 3, "expected": [5, 6], "actual": [7, 8]}
    parts = [
        {"mismatches": [where | {"in": "demo-5m.int8-log4-rounds.alone"}]},
        {"mismatches": [where | {"in": "demo-5m.int8-log4-rounds.small_chunks"}]},
    ]
    assert check_ties.differing(parts) == {("demo-5m", "int8-log4-rounds", "a.py[:9]", 3, 5, 7)}


def test_a_prompt_is_found_by_its_name():
    ids = check_ties.prompt_of(check_ties.DEMO_MODEL, "aiohttp/helpers.py[:114]")
    assert len(ids) == 114
    with pytest.raises(ValueError, match="does not name the start"):
        check_ties.prompt_of(check_ties.DEMO_MODEL, "aiohttp/helpers.py[:114] + 80")
