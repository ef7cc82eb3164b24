"""Simulated rounds whose draft lengths follow different policies."""

from __future__ import annotations

import random

import pytest
from draft_lengths.points import MS, POINTS
from draft_lengths.policies import Coming, FixedLength, Oracle, OwnAcceptance, TopProbability
from draft_lengths.simulation import PLAIN_STEPS, simulate
from draft_lengths.traces import Trace, chances, separation, traces_of

from sglang_kvspec.planning.rounds import RoundCost

DRAFT_LEN = 8
# Low signals of drafts that are rejected, high ones of those that are accepted.
LOW, HIGH = 10, 90
# Steps of 1 s, verifications of 4 s, plain steps of 2 s.
COST = RoundCost(step=1.0, row=0.0, request=3.0, token=0.0, plain=0.5)
SURE = [0.05] * 50 + [0.99] * 50


def trace_of(accepted, *, tells=True):
    """Make a trace whose signals tell which drafts are rejected, or are all high."""
    signals = [
        [HIGH if place < count or not tells else LOW for place in range(DRAFT_LEN)]
        for count in accepted
    ]
    return Trace(DRAFT_LEN, accepted, {"top": signals, "lead": signals})


def coming(accepted, signal=(HIGH,) * DRAFT_LEN, probability=0.95):
    return Coming(probability, DRAFT_LEN, accepted, signal)


def test_a_fixed_length_emits_what_is_accepted_and_one_token_more():
    # Rounds begin at tokens 0, 5 and 7.
    trace = trace_of([8, 0, 0, 0, 0, 1, 0, 8])
    outcome = simulate([trace], 1, FixedLength(4), COST)
    assert (outcome.rounds, outcome.steps, outcome.drafts) == (3, 12, 12)
    assert outcome.accepted == 4 + 1 + 4
    assert outcome.tokens == outcome.accepted + 3
    assert outcome.seconds == 3 * (4 * COST.step + COST.step + COST.request)


def test_rounds_without_drafts_take_plain_steps():
    outcome = simulate([trace_of([8] * 12)], 1, FixedLength(0), COST)
    assert (outcome.rounds, outcome.drafts, outcome.tokens) == (2, 0, 2 * PLAIN_STEPS)
    assert outcome.seconds == 2 * PLAIN_STEPS * 2


def test_all_requests_of_a_round_wait_for_the_longest():
    ends = trace_of([2] * 3)
    policy = Oracle(COST, price=0.1)
    alone = simulate([ends], 1, policy, COST)
    together = simulate([ends, trace_of([8] * 9)], 2, policy, COST)
    assert alone.seconds == 2 + COST.step + COST.request
    assert together.rounds == 1 + 1
    assert together.steps == 8 + 8


def test_a_read_between_steps_takes_time_in_each_step():
    trace = trace_of([8])
    base, synced = (simulate([trace], 1, FixedLength(4), COST, sync_s=s) for s in (0.0, 0.5))
    assert synced.seconds - base.seconds == 4 * 0.5


def test_the_top_probability_stops_behind_an_unsure_draft():
    policy = TopProbability(COST, SURE, price=0.2)
    signal = [HIGH, HIGH, LOW, *[HIGH] * 5]
    assert policy.lens([coming(2, signal)]) == [3]
    assert policy.lens([coming(8)]) == [DRAFT_LEN]


def test_signals_that_come_late_cost_a_draft():
    signal = [HIGH, HIGH, LOW, *[HIGH] * 5]
    late = TopProbability(COST, SURE, price=0.2, late=1)
    assert late.lens([coming(2, signal)]) == [4]


@pytest.mark.parametrize("late", [0, 1])
def test_lengths_do_not_depend_on_drafts_that_were_not_made(late):
    # A sampled request's distribution stays exact only if a stop looks at earlier drafts alone.
    rng = random.Random(0)
    policy = TopProbability(COST, [i / 100 for i in range(100)], price=0.3, late=late)
    for _ in range(200):
        signal = [rng.randrange(40, 100) for _ in range(DRAFT_LEN)]
        (length,) = policy.lens([coming(0, signal)])
        changed = [*signal[:length], *(rng.randrange(100) for _ in range(DRAFT_LEN - length))]
        assert policy.lens([coming(0, changed)]) == [length]


def test_no_policy_is_better_than_the_oracle_where_signals_tell_all():
    rng = random.Random(1)
    trace = trace_of([rng.randrange(DRAFT_LEN + 1) for _ in range(400)])
    price = 0.3
    fixed, own, top, oracle = (
        simulate([trace], 1, policy, COST).rate
        for policy in (
            FixedLength(4),
            OwnAcceptance(COST),
            TopProbability(COST, chances([trace], "top"), price),
            Oracle(COST, price),
        )
    )
    assert max(fixed, own) < top <= oracle


def test_a_price_beyond_all_gain_never_drafts():
    assert TopProbability(COST, SURE, price=float("inf")).lens([coming(8)]) == [0]
    assert Oracle(COST, price=float("inf")).lens([coming(8)]) == [0]


def test_chances_rise_with_the_signal():
    # One draft in two is accepted at signal 60, none at 70: both share their mean.
    def one(signal, accepted):
        return Trace(1, [accepted], {"top": [[signal]]})

    traces = [one(60, 1), one(60, 0), one(70, 0), one(90, 1)]
    found = chances(traces, "top")
    assert len(found) == 100
    assert found == sorted(found)
    assert found[60] == found[70] < found[90]
    # Of four pairs, 90 wins both, and 60 wins half of one.
    assert separation(traces, "top") == 2.5 / 4


def test_signals_that_say_nothing_separate_nothing():
    trace = trace_of([3, 0, 8, 5], tells=False)
    assert separation([trace], "top") == 0.5
    assert separation([trace_of([3, 0, 8, 5])], "top") == 1.0


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_points_have_the_times_that_they_name(point):
    cost, count = point.cost(), point.num_requests
    drafts = [1] * count
    verify = point.verify_ms + count * point.token_ms
    assert cost.seconds(drafts) == pytest.approx((point.step_ms + verify) * MS)
    assert cost.seconds([0] * count) == pytest.approx(point.plain_ms * MS)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_drafts_in_4_bits_are_cheaper_than_plain_steps_and_verifications_dearer(point):
    assert point.step_ms < point.plain_ms < point.verify_ms < 1.5 * point.plain_ms


def test_a_request_that_stops_alone_saves_only_its_kv_reads_and_its_verified_token():
    one, many = POINTS
    rows = many.row_ms + many.token_ms
    stopped = many.cost().seconds([8] * 15 + [7])
    assert many.cost().seconds([8] * 16) - stopped == pytest.approx(rows * MS)
    assert one.step_ms > 50 * rows


def test_results_without_rounds_at_every_token_are_refused():
    with pytest.raises(ValueError, match="--at-every-token"):
        traces_of({"settings": {"raw": {"all": []}}})
