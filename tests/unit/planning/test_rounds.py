"""Draft lengths of a round, compared with every other choice of lengths."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.planning.rounds import (
    RoundCost,
    RoundRequest,
    expected_rate,
    plan_round,
)

probabilities = st.one_of(st.floats(0, 0.999), st.sampled_from([0.0, 0.5, 0.95, 0.999]))
batches = st.lists(
    st.builds(RoundRequest, probabilities, st.integers(0, 4), st.integers(0, 3)), max_size=4
)
# Only a step must have a cost: a round without requests costs one step.
shares = st.one_of(st.just(0.0), st.floats(1e-4, 3))
costs = st.builds(RoundCost, st.floats(1e-3, 3), shares, shares, shares)


def every_plan(requests):
    rooms = [max(request.cap_len - request.num_drafts, 0) for request in requests]
    return itertools.product(*(range(room + 1) for room in rooms))


def tokens_of(requests, lens):
    """Return the expected tokens: one of each request's own, and the drafts up to the first
    rejection."""
    return math.fsum(
        1.0 + math.fsum(r.probability ** (r.num_drafts + k) for k in range(1, length + 1))
        for r, length in zip(requests, lens, strict=True)
    )


def seconds_of(cost, lens):
    """Return the time of a round, played step by step."""
    spent = []
    for step in range(max(lens, default=0)):
        rows = sum(length > step for length in lens)
        spent += [cost.step, cost.row * rows]
    spent += [cost.step, *(cost.request for _ in lens)]
    spent += [cost.token * (length + 1) for length in lens]
    return math.fsum(spent)


def rate_of(requests, cost, lens):
    return tokens_of(requests, lens) / seconds_of(cost, lens)


@given(cost=costs, lens=st.lists(st.integers(0, 9), max_size=6))
def test_a_round_costs_its_steps_and_its_verification(cost, lens):
    assert cost.seconds(lens) == pytest.approx(seconds_of(cost, lens), rel=1e-12)


@given(requests=batches, cost=costs, data=st.data())
def test_the_expected_rate_is_tokens_over_seconds(requests, cost, data):
    lens = data.draw(st.sampled_from(list(every_plan(requests))))
    wanted = rate_of(requests, cost, lens)
    assert expected_rate(requests, lens, cost) == pytest.approx(wanted, rel=1e-9)


@settings(max_examples=300)
@given(requests=batches, cost=costs)
def test_no_other_lengths_give_more_tokens_a_second(requests, cost):
    lens = plan_round(requests, cost)
    assert len(lens) == len(requests)
    assert all(
        0 <= n <= max(r.cap_len - r.num_drafts, 0) for n, r in zip(lens, requests, strict=True)
    )
    rates = {plan: rate_of(requests, cost, plan) for plan in every_plan(requests)}
    assert rates[tuple(lens)] >= max(rates.values()) * (1 - 1e-9)
    if max(rates.values()) <= rates[(0,) * len(requests)]:
        assert not any(lens)


@settings(max_examples=40)
@given(
    requests=st.lists(
        st.builds(RoundRequest, probabilities, st.integers(0, 64)), min_size=1, max_size=40
    ),
    cost=costs,
    seed=st.integers(0, 1000),
)
def test_a_large_batch_gains_by_no_single_change(requests, cost, seed):
    """There are too many plans to try all. A change of one request, or a cut of all to one length,
    must not help."""
    lens = plan_round(requests, cost)
    rate = expected_rate(requests, lens, cost)
    others = [[min(n, most) for n in lens] for most in range(max(lens) + 1)]
    everyone = range(len(requests))
    others += [[min(n + 1, r.cap_len) for n, r in zip(lens, requests, strict=True)]]
    for i in random.Random(seed).sample(everyone, min(8, len(requests))):
        for n in {0, max(lens[i] - 1, 0), min(lens[i] + 1, requests[i].cap_len)}:
            others.append([*lens[:i], n, *lens[i + 1 :]])
    best = max(expected_rate(requests, other, cost) for other in others)
    assert rate >= best * (1 - 1e-9)


@given(
    low=probabilities,
    gap=st.floats(1e-6, 1),
    num=st.integers(1, 20),
    cap_len=st.integers(0, 32),
    cost=costs,
)
def test_a_batch_of_like_requests_drafts_no_less_when_accepted_more(low, gap, num, cap_len, cost):
    high = min(low + gap, 0.999)
    fewer = plan_round([RoundRequest(low, cap_len)] * num, cost)
    more = plan_round([RoundRequest(high, cap_len)] * num, cost)
    assert len(set(fewer)) == len(set(more)) == 1
    if fewer[0] > more[0]:
        # Both lengths are worth the same up to rounding.
        better = [RoundRequest(high, cap_len)] * num
        rates = [expected_rate(better, lens, cost) for lens in (fewer, more)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-9)


@given(requests=batches, cost=costs)
def test_the_better_of_two_requests_drafts_no_less(requests, cost):
    lens = plan_round(requests, cost)
    pairs = itertools.permutations(zip(requests, lens, strict=True), 2)
    for (better, longer), (worse, shorter) in pairs:
        if better.probability < worse.probability or better.num_drafts > worse.num_drafts:
            continue
        if better.room >= worse.room:
            assert longer >= shorter


def test_a_poor_drafter_is_left_out_and_a_single_drafter_pays_no_step():
    cost = RoundCost(step=4.0, row=0.3, request=0.6, token=0.02)
    many = [RoundRequest(0.95, 32)] * 15
    lens = plan_round([*many, RoundRequest(0.05, 32)], cost)
    assert lens[-1] == 0
    assert min(lens[:15]) > 1
    assert plan_round([RoundRequest(0.95, 32), *[RoundRequest(0.05, 32)] * 15], cost) == [0] * 16


def test_nothing_is_drafted_where_it_never_pays():
    weights_only = RoundCost(step=4.0, row=0.0, request=0.0, token=0.0)
    assert plan_round([RoundRequest(0.999, 32)] * 64, weights_only) == [0] * 64
    free = RoundCost(step=1e-9, row=0.0, request=1.0, token=0.0)
    assert plan_round([RoundRequest(0.0, 32)] * 3, free) == [0] * 3
    assert plan_round([RoundRequest(0.999, 0)] * 3, free) == [0] * 3


def test_everything_is_drafted_where_only_verifying_costs():
    free = RoundCost(step=1e-9, row=0.0, request=1.0, token=0.0)
    lens = plan_round([RoundRequest(0.5, 7), RoundRequest(0.9, 3), RoundRequest(0.9, 0)], free)
    assert lens == [7, 3, 0]


def test_drafts_from_earlier_rounds_leave_less_room():
    cost = RoundCost(step=1e-9, row=0.3, request=9.0, token=0.02)
    fresh = RoundRequest(0.8, 32)
    lens = plan_round([*[fresh] * 7, RoundRequest(0.8, 32, num_drafts=30)], cost)
    assert 4 < lens[0] < 32
    # No further draft of this request would be as good as its last ones.
    assert lens[-1] == 0
    sure = RoundRequest(0.999, 32, num_drafts=30)
    assert plan_round([*[fresh] * 7, sure], cost)[-1] == 2


def test_the_target_takes_longer_than_drafts_but_not_less():
    cost = RoundCost(2.0, 0.5, 1.0, 0.25, plain=1.5, target_step=5.0)
    assert cost.seconds([3, 1]) == 3 * 2.0 + 4 * 0.5 + 5.0 + 2 * 1.0 + 6 * 0.25
    assert cost.seconds([0, 0]) == 1.5 * (5.0 + 2 * 1.0)
    slow_drafts = RoundCost(9.0, 0.0, 0.0, 0.0, target_step=5.0)
    assert slow_drafts.seconds([1]) == 9.0 + 9.0


def test_an_empty_batch():
    cost = RoundCost(4.0, 0.3, 0.6, 0.02)
    assert plan_round([], cost) == []
    assert cost.seconds([]) == 4.0


@pytest.mark.parametrize("plain", [None, 1.0])
def test_costs_that_are_all_zero_can_be_planned_with(plain):
    """Measured times may say so, and a server must not end for it."""
    free = RoundCost(step=0.0, row=0.0, request=0.0, token=0.0, plain=plain)
    requests = [RoundRequest(0.9, 8), RoundRequest(0.5, 3)]
    assert all(0 <= n <= r.room for n, r in zip(plan_round(requests, free), requests, strict=True))
    assert plan_round([], free) == []
