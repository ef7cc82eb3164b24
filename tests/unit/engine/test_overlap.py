"""OverlappedRounds: rounds that are pre-launched before SGLang receives the tokens of the last
one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.engine.overlap import OverlappedRounds
from sglang_kvspec.planning.round_plan import RoundPlan
from sglang_kvspec.runtime.sampling import SamplingParams


class Planner:
    """Residual planner that records its calls."""

    def __init__(self, done):
        self.done = done

    def plan(self, states, pages, lens, budget, held, *, drafts):
        self.done.append("plan")
        self.lens, self.drafts = lens, drafts
        return RoundPlan(tuple(i for i in range(len(states)) if i not in held))

    def plan_ahead(self, states, pages, lens, budget, held, *, drafts):
        self.done.append("plan ahead")
        self.lens, self.drafts = lens, drafts
        return RoundPlan(tuple(range(len(states))))

    def fetch_ahead(self, plan):
        self.done.append("fetch ahead")

    def cancel(self):
        self.done.append("cancel")


class Rounds:
    """OverlappedRounds over fakes, which record the order of their calls."""

    def __init__(self, fakes, *lens, num_free=9, host_pages=9, may_advance=True, arrivals=None):
        self.done = []
        self._drafts_on_device = fakes.drafts_on_device
        self.drafter = SimpleNamespace(draft=self._draft)
        self.starter = fakes.starter_of(
            planner=Planner(self.done),
            drafter=self.drafter,
            host_pages=host_pages,
            arrivals=arrivals or fakes.Arrivals(),
        )
        slots = SimpleNamespace(num_free=num_free)
        self.starter.kv.window = SimpleNamespace(slots=slots)
        self.scheduler = fakes.Scheduler(*lens, may_advance=may_advance)
        pages = SimpleNamespace(flush=lambda: self.done.append("flush"))
        self.overlap = OverlappedRounds(self.starter, self.scheduler, pages, max_draft_len=16)

    def _draft(self, batch, lens):
        self.done.append("draft")
        return self._drafts_on_device(batch, lens)

    def launch(self, batch):
        self.overlap.plan_next(batch, None)
        self.overlap.launch(batch)
        return self.overlap.ahead


@pytest.mark.parametrize(
    ("next_len", "position", "num_free", "order"),
    [
        (3, 64 + 20, 0, ["draft", "flush", "plan ahead"]),
        # Plain steps must read full pages in encoded form, so the pages are flushed first.
        (0, 64 + 20, 9, ["flush", "flush", "plan ahead"]),
        # Two requests enter another page, or begin one.
        (3, 64 + 62, 2, ["draft", "flush", "plan ahead"]),
        (3, 64 + 62, 1, ["flush", "draft", "flush", "plan ahead"]),
        (3, 128, 1, ["flush", "draft", "flush", "plan ahead"]),
    ],
)
def test_full_pages_are_encoded_behind_the_next_drafts(fakes, next_len, position, num_free, order):
    """Verifications are planned after pages are encoded, since the plan counts their residuals."""
    rounds = Rounds(fakes, next_len, next_len, num_free=num_free)
    states = [request_state(rid, committed_len=position) for rid in "ab"]
    ahead = rounds.launch(fakes.batch_of(states))
    assert rounds.done == order
    assert ahead.lens == [next_len] * 2
    assert ahead.verify == [0, 1]


def test_a_launched_round_drafts_no_further_than_each_request_has_room(fakes):
    """The room accounts for drafts made meanwhile, and for the cap of a request that is about to
    end."""
    rounds = Rounds(fakes, 9, 9, 9)
    states = [request_state(rid, num_drafts=n) for rid, n in (("a", 0), ("b", 12), ("c", 0))]
    states[2].remaining = 3
    ahead = rounds.launch(fakes.batch_of(states))
    assert ahead.lens == rounds.overlap.next.lens == [9, 4, 2]


@pytest.mark.parametrize(
    ("remaining", "wants_logprobs", "params", "launches"),
    [
        (100, False, SamplingParams(top_k=1), True),
        (0, False, SamplingParams(top_k=1), False),
        (100, True, SamplingParams(top_k=1), False),
        (100, False, SamplingParams(temperature=0.9), False),
    ],
)
def test_a_round_is_launched_where_the_device_can_choose_all_tokens(
    fakes, remaining, wants_logprobs, params, launches
):
    state = request_state(remaining=remaining)
    state.params = params
    rounds = Rounds(fakes, 3)
    ahead = rounds.launch(fakes.batch_of([state], wants_logprobs=wants_logprobs))
    assert (ahead is not None) == launches
    assert ("draft" in rounds.done) == launches


def test_a_round_whose_drafts_piggyback_is_not_launched(fakes):
    rounds = Rounds(fakes, 0, 0, may_advance=False)
    assert rounds.launch(fakes.batch_of([request_state(rid) for rid in "ab"])) is None
    assert rounds.done == []


@pytest.mark.parametrize(
    "options", [{"host_pages": 0}, {"come_with_requests": True}, {"late": frozenset({0})}]
)
def test_verifications_are_planned_ahead_only_where_fetches_are_sure_to_help(fakes, options):
    late = options.pop("late", frozenset())
    come = options.pop("come_with_requests", False)
    arrivals = fakes.Arrivals(come_with_requests=come)
    rounds = Rounds(fakes, 3, arrivals=arrivals, **options)
    assert rounds.launch(fakes.batch_of([request_state()], late=late)).plan is None
    assert rounds.done == ["draft", "flush"]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_drafts_that_the_cpu_knows_are_drafts_of_the_round(fakes, is_interrupted):
    """A round without drafts must verify, whatever its fetches take. This round has made some."""

    def draft(batch, lens):
        for state, count in zip(batch.states, lens, strict=True):
            state.drafts.extend(range(count))

    rounds = Rounds(fakes, 3)
    rounds.drafter.draft = draft
    batch = fakes.batch_of([request_state()])
    rounds.launch(batch)
    if is_interrupted:
        rounds.overlap.interrupt()
        rounds.overlap.take(batch)
    planner = rounds.starter.planner
    assert planner.drafts
    # The drafts are in the states, and the round adds none to them.
    assert planner.lens == [0]


def test_a_launched_round_is_taken_once(fakes):
    rounds = Rounds(fakes, 3)
    batch = fakes.batch_of([request_state()])
    ahead = rounds.launch(batch)
    rounds.done.clear()
    taken = rounds.overlap.take(batch)
    assert taken.lens == ahead.lens
    assert taken.plan is not None
    assert rounds.done == ["fetch ahead"]
    assert rounds.overlap.take(batch) is None


def test_an_interrupted_round_plans_its_verifications_again(fakes):
    rounds = Rounds(fakes, 3)
    batch = fakes.batch_of([request_state()])
    ahead = rounds.launch(batch)
    rounds.done.clear()
    rounds.overlap.interrupt()
    assert rounds.starter.side.joins == 1
    assert ahead.is_interrupted
    assert ahead.plan is None
    assert rounds.done == ["cancel"]
    taken = rounds.overlap.take(batch)
    assert taken.is_interrupted
    assert taken.verify == [0]
    assert rounds.done == ["cancel", "plan"]


def test_a_round_that_all_verifying_requests_have_left_is_planned_again(fakes):
    rounds = Rounds(fakes, 3, 3)
    states = [request_state(rid) for rid in "ab"]
    rounds.launch(fakes.batch_of(states)).plan = RoundPlan((0,))
    rounds.done.clear()
    taken = rounds.overlap.take(fakes.batch_of(states[1:]))
    assert taken.verify == [0]
    assert rounds.done == ["cancel", "plan"]


def test_held_requests_stay_held_when_verifications_are_planned_again(fakes):
    rounds = Rounds(fakes, 3, 3)
    states = [request_state(rid) for rid in "ab"]
    rounds.scheduler.schedule = fakes.schedule_of(3, 3, held=frozenset({0}))
    rounds.launch(fakes.batch_of(states))
    rounds.overlap.interrupt()
    taken = rounds.overlap.take(fakes.batch_of([*states[::-1], request_state("c")]))
    assert taken.held == {1}
    assert taken.verify == [0, 2]


def test_no_round_is_interrupted_or_cancelled_where_none_has_begun(fakes):
    rounds = Rounds(fakes, 3)
    rounds.overlap.interrupt()
    rounds.overlap.keep_tokens()
    rounds.overlap.cancel()
    assert rounds.starter.side.joins == 2
    assert rounds.done == []


def test_a_cancelled_round_is_forgotten_once_the_device_has_left_it(fakes):
    rounds = Rounds(fakes, 3)
    batch = fakes.batch_of([request_state()])
    rounds.launch(batch)
    rounds.done.clear()
    rounds.overlap.cancel()
    assert rounds.starter.side.joins == 1
    assert rounds.done == ["cancel"]
    assert rounds.overlap.take(batch) is None
