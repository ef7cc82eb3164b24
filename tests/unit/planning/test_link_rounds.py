"""Length of rounds where a link brings residuals, compared with rounds played request by
request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.planning.link_rounds import Turns, plan_turns, share_of_speed
from sglang_kvspec.planning.rounds import RoundCost, RoundRequest, plan_round

COST = RoundCost(step=4.7e-3, row=0.36e-3, request=0.6e-3, token=0.05e-3)
GOOD = RoundRequest(0.985, 64)
ENDLESS = 1e-9

requests = st.builds(RoundRequest, st.floats(0, 0.999), st.integers(0, 16), st.integers(0, 16))
turns = st.builds(Turns, st.integers(0, 12), st.floats(1, 12), st.floats(1e-6, 1))


def rate_of(num, length, turns):
    """Return the tokens a second of requests like GOOD that all fetch, from the rounds in which
    each verifies once."""
    seconds, verified = 0.0, 0.0
    for _ in range(200):
        seconds = max(COST.seconds([length] * num, verified), verified * turns.fetch_s)
        verified = min(num, turns.most, seconds / turns.fetch_s)
    kept = sum(0.985**k for k in range(min(round(length * num / verified), 64) + 1))
    return verified * kept / seconds


@pytest.mark.parametrize("fetch_s", [5e-3, 22e-3, 60e-3])
@pytest.mark.parametrize("most", [2, 5])
def test_about_the_best_length_of_all(most, fetch_s):
    link = Turns(0, most, fetch_s)
    chosen = plan_turns([GOOD] * 16, COST, link).lens
    assert len(set(chosen)) == 1
    best = max(rate_of(16, length, link) for length in range(65))
    assert rate_of(16, chosen[0], link) >= 0.97 * best


def test_a_slower_link_lets_all_requests_draft_longer():
    lens = [plan_turns([GOOD] * 16, COST, Turns(0, 5, s)).lens[0] for s in (5e-3, 20e-3, 40e-3)]
    assert lens == sorted(lens)
    assert lens[0] < lens[-1]


def test_where_all_residuals_stay_the_plan_is_that_of_a_plain_round():
    chosen = plan_turns([GOOD] * 16, COST, Turns(16, 1, ENDLESS)).lens
    assert chosen == plan_round([GOOD] * 16, COST)


def test_a_request_without_gain_adds_no_drafts():
    poor = RoundRequest(0.3, 64)
    tired = RoundRequest(0.9, 64, num_drafts=60)
    chosen = plan_turns([GOOD] * 12 + [poor, tired], COST, Turns(2, 3, 22e-3)).lens
    assert chosen[0] > chosen[-2] >= 0
    assert chosen[-1] == 0


@given(st.lists(requests, max_size=5), turns)
def test_lengths_are_possible(batch, link):
    chosen = plan_turns(batch, COST, link).lens
    assert len(chosen) == len(batch)
    assert all(0 <= n <= request.room for n, request in zip(chosen, batch, strict=True))


def test_the_share_of_speed_falls_with_the_link():
    found = [share_of_speed([GOOD] * 16, COST, 4.0, s) for s in (1e-6, 5e-3, 22e-3, 60e-3, 0.5)]
    shares = [each.share for each in found]
    assert shares == sorted(shares, reverse=True)
    # Longer drafts between verifications cost something, even on a free link. On an almost useless
    # link only the three of sixteen requests whose residuals stay can verify.
    assert 0.85 < shares[0] < 1
    assert 3 / 16 < shares[-1] < 0.4
    assert f"{found[2].share:.2f} of the" in found[2].reason
    assert "those of 45 requests a second" in found[2].reason


def test_drafts_that_requests_have_do_not_make_them_slow():
    tired = [RoundRequest(0.985, 64, num_drafts=60)] * 16
    assert share_of_speed(tired, COST, 4.0, 22e-3) == share_of_speed([GOOD] * 16, COST, 4.0, 22e-3)


def test_rounds_with_piggyback_drafts_are_faster():
    """Piggyback drafts on a round's verification need no draft step."""
    piggybacking = replace(COST, piggyback=True)
    assert piggybacking.seconds([4] * 16, 3) == pytest.approx(
        COST.seconds([4] * 16, 3) + 13 * (COST.row + COST.token)
    )
    alone, together = (
        share_of_speed([GOOD] * 16, cost, 4.0, 22e-3) for cost in (COST, piggybacking)
    )
    assert together.share > alone.share


def test_no_request_piggybacks_where_all_verify():
    piggybacking = replace(COST, piggyback=True)
    assert piggybacking.seconds([4] * 16) == COST.seconds([4] * 16)
    assert plan_round([GOOD] * 16, piggybacking) == plan_round([GOOD] * 16, COST)
