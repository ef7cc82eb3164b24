"""RoundStarter: the drafts or plain tokens of a round, and the requests that verify at its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.planning.round_plan import RoundPlan
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.sampling import SamplingParams

PLAIN_STEPS = 8


class PlainSteps:
    """Plain steps that give token 0 to all requests that are not skipped."""

    def __init__(self):
        self.asked = []

    def advance(self, batch, max_steps, skipped):
        self.asked.append((max_steps, skipped))
        lens = [0 if i in skipped else max_steps for i in range(len(batch.states))]
        order = [i for i, n in enumerate(lens) if n]
        tokens = torch.zeros((max_steps, len(order)), dtype=torch.int64)
        return DraftedTokens(tokens, order, lens), torch.zeros((len(order), 5))


class Drafter:
    """Drafter that records the lens that are asked of it."""

    def __init__(self):
        self.asked = []

    def draft(self, batch, lens):
        self.asked.append(list(lens))
        tokens = torch.zeros((max(lens), sum(n > 0 for n in lens)), dtype=torch.int64)
        return DraftedTokens(tokens, [i for i, n in enumerate(lens) if n], list(lens))


@pytest.fixture
def plain():
    return PlainSteps()


@pytest.fixture
def with_plain(fakes, plain):
    return fakes.starter_of(plain=plain, plain_steps=PLAIN_STEPS)


@pytest.mark.parametrize(
    ("remaining", "drafts", "tail", "advances"),
    [(9, [], [], True), (0, [], [], False), (9, [4], [], False), (9, [], [4], False)],
)
def test_plain_steps_skip_late_requests(
    fakes, with_plain, plain, remaining, drafts, tail, advances
):
    """No round is plain if the ready request has no token left to take, or has drafts or a tail to
    verify."""
    late, ready = (request_state(rid, num_drafts=2) for rid in "ab")
    ready.remaining, ready.drafts, ready.tail = remaining, drafts, tail
    batch = fakes.batch_of([late, ready], late=frozenset({0}))
    started = with_plain.start(batch, fakes.schedule_of(0, 0))
    assert plain.asked == ([(PLAIN_STEPS, frozenset({0}))] if advances else [])
    assert started.is_plain == advances
    assert started.verify == [1]
    assert started.pending == frozenset()


def test_a_schedule_may_rule_out_plain_steps(fakes, with_plain, plain):
    batch = fakes.batch_of([request_state()])
    assert not with_plain.start(batch, fakes.schedule_of(0, may_advance=False)).is_plain
    assert not plain.asked
    assert with_plain.start(batch, fakes.schedule_of(0)).is_plain


@pytest.mark.parametrize("wants_logprobs", [True, False])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_plain_tokens_are_taken_one_by_one_where_the_cpu_must_see_their_logits(
    fakes, with_plain, plain, wants_logprobs, is_greedy
):
    states = [request_state("a"), request_state("b")]
    if not is_greedy:
        states[1].params = SamplingParams(temperature=0.9)
    batch = fakes.batch_of(states, wants_logprobs=wants_logprobs)
    started = with_plain.start(batch, fakes.schedule_of(0, 0))
    at_once = is_greedy and not wants_logprobs
    assert plain.asked == [(PLAIN_STEPS if at_once else 1, frozenset())]
    assert started.num_steps == (PLAIN_STEPS if at_once else 1)
    assert (started.logits is None) == at_once


def test_a_round_remembers_which_requests_lacked_residuals_when_it_began(fakes):
    """Residuals may arrive while the round drafts, but its drafts were made without them."""
    here, pending = (request_state(rid, num_drafts=2) for rid in "ab")
    starter = fakes.starter_of(arrivals=fakes.Arrivals("b"))
    started = starter.start(fakes.batch_of([here, pending]), fakes.schedule_of(1, 1))
    assert started.pending == {1}


def test_requests_draft_alone_where_none_verifies(fakes):
    drafter = Drafter()
    starter = fakes.starter_of(drafter=drafter)
    states = [request_state(rid) for rid in "abc"]
    fields = {"may_advance": False, "alone": [1, 0, 1]}
    held = fakes.schedule_of(0, 0, 0, held=frozenset({0, 1, 2}), **fields)
    started = starter.start(fakes.batch_of(states), held)
    assert drafter.asked == [[1, 0, 1]]
    assert (started.lens, started.num_steps, started.verify) == ([1, 0, 1], 1, [])
    # In a round in which a request verifies, the drafts piggyback on the verification.
    one = fakes.schedule_of(0, 0, 0, held=frozenset({0, 2}), **fields)
    started = starter.start(fakes.batch_of(states), one)
    assert drafter.asked == [[1, 0, 1]]
    assert (started.lens, started.num_steps, started.verify) == ([0, 0, 0], 0, [1])


@pytest.mark.parametrize("alone", [(), [1, 1, 1]])
def test_late_and_held_requests_are_planned_for_as_held(fakes, alone):
    asked = []

    def plan(states, pages, lens, budget, held, *, drafts):
        asked.append((list(lens), held, drafts))
        return RoundPlan((2,))

    starter = fakes.starter_of(planner=SimpleNamespace(plan=plan), host_pages=9)
    batch = fakes.batch_of([request_state(rid) for rid in "abc"], late=frozenset({0}))
    schedule = fakes.schedule_of(0, 0, 0, held=frozenset({1}), alone=alone)
    started = starter.start(batch, schedule)
    assert asked == [([0, 0, 0], {0, 1}, bool(alone))]
    assert started.verify == [2]
    # Without `plans` the plan is made later.
    assert starter.start(batch, schedule, plans=False).plan is None
    assert len(asked) == 1


def test_time_between_rounds_is_known_where_every_round_verifies(fakes, with_plain):
    batch, schedule = fakes.batch_of([request_state()]), fakes.schedule_of(1)
    starter = fakes.starter_of()
    assert starter.start(batch, schedule).between_s is None
    starter.over_at = 0.0
    started = starter.start(batch, schedule)
    assert started.between_s == started.begun_at > 0
    with_plain.over_at = 0.0
    assert with_plain.start(batch, schedule).between_s is None
