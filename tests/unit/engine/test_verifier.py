"""Verifier: rows of verifications and piggyback drafts, and their results on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.engine.eager_verify import EagerVerify
from sglang_kvspec.engine.ports import VerifyLogits
from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.engine.verifier import Verifier
from sglang_kvspec.kv.forward_plan import RowKind
from sglang_kvspec.planning.round_plan import RoundPlan
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.spec_sampler import SpecSampler

VOCAB, CPU = 60, torch.device("cpu")
SAMPLED = SamplingParams(temperature=0.9)


class Forward:
    """Forward whose logits choose token 10 * i + place for the tokens of request i."""

    def __init__(self):
        self.rows = []

    def run(self, batch, rows, made=None):
        self.rows.append(dict(rows))
        tokens = [10 * i + place for i, row in rows.items() for place in range(row.length)]
        logits = torch.zeros((len(tokens), VOCAB))
        logits[range(len(tokens)), tokens] = 200.0
        return logits


@pytest.fixture
def forward():
    return Forward()


@pytest.fixture
def make_verifier(fakes, forward):
    def make(**parts):
        given = {
            "eager": EagerVerify(forward),
            "captured": None,
            "scheduler": fakes.Scheduler(most_drafts=9),
            "planner": SimpleNamespace(await_fetches=lambda plan, pages: None),
            "guard": SimpleNamespace(drop=lambda batch, rows: None),
            "sampler": SpecSampler(0, CPU),
            "ranks": Ranks(),
            "timer": PhaseTimer(CPU),
            "page_size": 64,
        }
        return Verifier(**(given | parts))

    return make


def started_of(states, verify, lens=None, made=None):
    lens = [0] * len(states) if lens is None else lens
    plan = RoundPlan(tuple(verify))
    return StartedRound(list(states), lens, PhaseTimer(CPU), plan=plan, made=made)


@pytest.fixture
def six(fakes):
    """A batch in which request 0 verifies, request 1 is sampled, request 2 has all drafts that it
    can use, and the others have some. Each makes one more draft in the round."""
    states = [request_state(str(i), num_drafts=n) for i, n in enumerate((2, 2, 8, 5, 1, 3))]
    states[1].params = SAMPLED
    tokens = torch.full((1, 6), 7)
    made = DraftedTokens(tokens, list(range(6)), [1] * 6)
    return fakes.batch_of(states), started_of(states, [0], [1] * 6, made)


def test_requests_with_the_fewest_drafts_piggyback_on_a_verification(make_verifier, six):
    batch, started = six
    done = make_verifier(most_piggyback=2).begin(batch, started)
    assert list(done.rows) == [0]
    assert list(done.piggyback) == [4, 5]
    for i, row in done.piggyback.items():
        state = batch.states[i]
        start = state.committed_len + len(state.drafts) + 1
        assert (row.kind, row.start, row.length) == (RowKind.DRAFT, start, 1)
    assert started.num_piggyback == 2
    assert done.left == [0, 3, 9, 6, 3, 5]
    assert started.num_verified == [3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("most_piggyback", "found"), [(0, []), (1, [4]), (6, [3, 4, 5])])
def test_piggyback_drafts_are_limited_by_room_and_by_caps(
    make_verifier, six, most_piggyback, found
):
    done = make_verifier(most_piggyback=most_piggyback).begin(*six)
    assert list(done.piggyback) == found


def test_sampled_requests_piggyback_where_the_schedule_allows(make_verifier, fakes, six):
    scheduler = fakes.Scheduler(most_drafts=9, piggybacks_sampled=True)
    done = make_verifier(scheduler=scheduler, most_piggyback=6).begin(*six)
    assert list(done.piggyback) == [1, 3, 4, 5]


def test_no_request_piggybacks_where_none_verifies(make_verifier, forward, fakes):
    states = [request_state(rid, num_drafts=1) for rid in "ab"]
    started = started_of(states, [])
    done = make_verifier(most_piggyback=2).begin(fakes.batch_of(states), started)
    assert not done.rows
    assert not done.piggyback
    assert done.logits is None
    assert done.left == [1, 1]
    assert not forward.rows
    assert started.num_piggyback == 0


def test_forwards_without_room_for_drafts_verify_alone(make_verifier, six, forward):
    done = make_verifier(most_piggyback=2, drafts_eagerly=False).begin(*six)
    assert list(forward.rows[0]) == [0]
    assert not done.piggyback
    assert not done.was_captured
    assert six[1].num_piggyback == 0


def test_a_verification_reads_the_tail_the_pending_token_and_all_drafts(
    make_verifier, fakes, forward
):
    state = request_state(committed_len=127, num_drafts=3)
    state.tail = [0, 0]
    batch, started = fakes.batch_of([state]), started_of([state], [0])
    make_verifier().begin(batch, started)
    (row,) = forward.rows[0].values()
    assert (row.kind, row.start, row.length) == (RowKind.VERIFY, 125, 6)
    assert row.pages.tolist() == [0, 1, 2]
    assert started.ends_prompts
    assert started.num_verified == [3]


def test_requests_that_the_guard_drops_do_not_verify(make_verifier, fakes, forward):
    states = [request_state(rid, num_drafts=2) for rid in "ab"]
    guard = SimpleNamespace(drop=lambda batch, rows: rows.pop(0))
    started = started_of(states, [0, 1])
    done = make_verifier(guard=guard, most_piggyback=2).begin(fakes.batch_of(states), started)
    assert list(done.rows) == list(forward.rows[0]) == [1]
    assert started.num_verified == [0, 2]
    assert done.left == [2, 0]


def test_drafts_reach_the_states_in_order(make_verifier, six):
    batch, started = six
    before = [len(state.drafts) for state in batch.states]
    verifier = make_verifier(most_piggyback=2)
    done = verifier.begin(batch, started)
    verifier.receive(batch, done)
    for i, state in enumerate(batch.states):
        assert state.drafts[before[i] :] == [7, 10 * i] if i in (4, 5) else [7]
    assert done.top1[0].tolist() == [0, 1, 2, 3]


def test_a_sampled_piggyback_draft_is_chosen_on_the_cpu(make_verifier, fakes):
    states = [request_state(rid, num_drafts=1) for rid in "abc"]
    states[1].params = SAMPLED
    scheduler = fakes.Scheduler(piggybacks_sampled=True)
    batch, started = fakes.batch_of(states), started_of(states, [0])
    verifier = make_verifier(scheduler=scheduler, most_piggyback=2)
    done = verifier.begin(batch, started)
    verifier.receive(batch, done)
    # The logits allow one token only. The distribution is kept for the verification.
    assert states[1].drafts == [0, 10]
    assert len(states[1].draft_probs) == 1
    assert states[2].drafts == [0, 20]
    assert states[2].draft_probs == []


@pytest.mark.parametrize("has_room", [True, False])
def test_a_captured_verification_is_replayed_where_it_has_room(
    make_verifier, six, forward, has_room
):
    logits = torch.zeros((4, VOCAB))

    def run(batch, rows, made, piggyback):
        return VerifyLogits(logits) if has_room else None

    done = make_verifier(captured=SimpleNamespace(run=run), most_piggyback=2).begin(*six)
    assert done.was_captured == has_room
    assert len(forward.rows) == (not has_room)
    assert (done.logits is logits) == has_room


def test_fetches_are_awaited_before_the_forward(make_verifier, fakes, forward):
    awaited = []

    def await_fetches(plan, pages):
        assert not forward.rows
        awaited.append(plan.verify)

    states = [request_state(rid, num_drafts=1) for rid in "ab"]
    verifier = make_verifier(planner=SimpleNamespace(await_fetches=await_fetches))
    verifier.begin(fakes.batch_of(states), started_of(states, [1]))
    assert awaited == [(1,)]
    assert len(forward.rows) == 1
