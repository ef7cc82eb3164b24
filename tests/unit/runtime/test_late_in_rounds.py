"""Requests whose residuals are still on the network, in rounds: they draft, and hold up nobody."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.planning.link_rounds import Turns
from sglang_kvspec.planning.round_step import RoundBudget
from sglang_kvspec.planning.rounds import RoundCost
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.round_lengths import FIRST_DRAFT_LEN, LATE_STEPS, RoundLengths
from sglang_kvspec.runtime.round_stepper import RoundStepper
from sglang_kvspec.runtime.started_round import StartedRound

SIZE = 32
PLENTY = RoundBudget(100, 100)


def of_pages(rid, num_pages, num_drafts=0):
    return request_state(rid, committed_len=num_pages * SIZE, num_drafts=num_drafts)


def pages(*ids):
    return torch.tensor(ids, dtype=torch.int64)


def land_anchors(kv, ids):
    """Their residuals are still to come."""
    kv.begin_encode(ids)
    kv.finish_anchors(ids)


@pytest.fixture
def arrived(encoded):
    """A pool whose pages 1 to 3 are complete and whose pages 4 and 5 lack residuals."""

    def make(**options):
        kv = encoded(3, **options)
        land_anchors(kv, [4, 5])
        return kv

    return make


@pytest.mark.parametrize("pools", [{"store": False}, {"cache_pages": 0}, {"cache_pages": 2}])
def test_whoever_lacks_residuals_does_not_verify(arrived, pools):
    kv = arrived(**pools)
    stepper = RoundStepper(kv)
    # Pages behind the verified tokens are empty yet; the last request has one page of two.
    states = [of_pages("a", 1), of_pages("b", 2), of_pages("c", 2)]
    ids = [pages(1, 6), pages(2, 3, 7), pages(4, 5, 8)]
    late = stepper.find_late(states, ids)
    assert late == {2}
    assert [state.has_waited for state in states] == [False, False, True]
    for _ in range(30):
        assert 2 not in stepper.plan(states, ids, [4, 4, 4], PLENTY, late).verify
    kv.residuals.finish([4, 5])
    assert stepper.find_late(states, ids) == frozenset()
    assert states[2].has_waited
    soon = [stepper.plan(states, ids, [0, 0, 0], PLENTY) for _ in range(12)]
    assert any(2 in plan.verify for plan in soon)


def test_one_page_of_many_is_enough_to_wait_for(arrived):
    kv = arrived(store=False)
    state = of_pages("a", 3)
    assert RoundStepper(kv).find_late([state], [pages(1, 4, 2)]) == {0}
    assert RoundStepper(kv).find_late([of_pages("b", 1)], [pages(1, 4)]) == frozenset()


def test_slots_of_pages_that_land_are_nobodys(encoded):
    """They cannot make room for a fetch."""
    kv = encoded(5, cache_pages=5)
    kv.residuals.evict([1, 2, 3, 4, 5])
    land_anchors(kv, [6])
    states = [of_pages("a", 3), of_pages("b", 2), of_pages("c", 1)]
    ids = [pages(1, 2, 3, 7), pages(4, 5, 8), pages(6, 9)]
    stepper = RoundStepper(kv)
    late = stepper.find_late(states, ids)
    assert late == {2}
    assert len(stepper.plan(states, ids, [4, 4, 4], PLENTY, late).verify) == 1
    kv.check_integrity()


def make_lengths(kv, measured, draft_len="auto", host_gb=None):
    # Where verifying reads much more than drafting.
    cost = RoundCost(step=4e-3, row=0.3e-3, request=1.2e-3, token=0.02e-3)
    clock = SimpleNamespace(has_measured=measured, cost=lambda context: cost)
    config = KVSpecConfig(draft_len=draft_len, host_gb=host_gb)
    return RoundLengths(config, clock, RoundStepper(kv), Ranks())


def test_a_late_request_has_no_say_in_what_others_draft(encoded):
    lengths = make_lengths(encoded(1), measured=True)
    states = [of_pages("a", 4), of_pages("b", 4)]
    alone, _ = lengths.plan(states)
    assert 0 < max(alone) < 32
    many = [of_pages(str(n), 4) for n in range(6)]
    beside, _ = lengths.plan([*states, *many], range(2, 8))
    assert beside[:2] == alone
    assert beside[2:] == [max(*alone, LATE_STEPS)] * 6


def test_a_late_request_drafts_up_to_its_cap(encoded):
    lengths = make_lengths(encoded(1), measured=True)
    nearly, at_cap = of_pages("a", 4, num_drafts=29), of_pages("b", 4, num_drafts=31)
    near_its_end = request_state("c", committed_len=64, remaining=3)
    assert lengths.plan([nearly, at_cap, near_its_end], range(3))[0] == [2, 0, 2]
    assert lengths.plan([of_pages("d", 4)], [0])[0] == [LATE_STEPS]


def test_requests_draft_longer_only_while_residuals_move(encoded, monkeypatch):
    lengths = make_lengths(encoded(1), measured=True, host_gb=1)
    waiting = [of_pages("a", 4, num_drafts=29), of_pages("b", 4, num_drafts=61)]
    assert lengths.plan(waiting, range(2))[0] == [2, 0]
    assert not lengths.pays(waiting[0], 31)
    monkeypatch.setattr(lengths._stepper, "turns", lambda: Turns(0, 2.0, 1e-3))
    assert lengths.plan(waiting, range(2))[0] == [LATE_STEPS, 2]
    assert lengths.pays(waiting[0], 31)


@pytest.mark.parametrize(("measured", "draft_len"), [(True, "auto"), (False, "auto"), (True, 16)])
def test_once_all_is_here_it_verifies_what_it_has(encoded, measured, draft_len):
    lengths = make_lengths(encoded(1), measured, draft_len)
    states = [of_pages("a", 4, num_drafts=5), of_pages("b", 4)]
    for state in states:
        state.has_waited = True
    assert lengths.plan(states)[0][0] == 0
    states[0].commit([1])
    assert min(lengths.plan(states)[0]) > 0


@pytest.mark.parametrize("draft_len", ["auto", 8])
def test_lengths_chosen_before_drafts_are_verified_are_those_of_after(encoded, draft_len):
    lengths = make_lengths(encoded(1), True, draft_len)
    states = [of_pages("a", 4, num_drafts=30), of_pages("b", 4)]
    before, _ = lengths.plan(states, num_drafts=[0, 0])
    assert before != lengths.plan(states)[0]
    states[0].drafts.clear()
    assert before == lengths.plan(states)[0]


def test_one_that_takes_turns_with_others_drafts_on(encoded, monkeypatch):
    """All of its residuals are here, but not all in the cache."""
    lengths = make_lengths(encoded(1), measured=False)
    state = of_pages("a", 4, num_drafts=5)
    state.has_waited = True
    assert lengths.plan([state])[0] == [0]
    monkeypatch.setattr(RoundStepper, "turns", lambda self: Turns(0, 1.0, 1.0))
    assert lengths.plan([state])[0] == [FIRST_DRAFT_LEN]


def test_before_anything_was_measured_it_drafts_as_others_do(encoded):
    lengths = make_lengths(encoded(1), measured=False)
    states = [of_pages("a", 4), of_pages("b", 4)]
    assert lengths.plan(states, [1])[0] == [FIRST_DRAFT_LEN] * 2


def make_round(lens, late=()):
    states = [of_pages(str(i), 1) for i in range(len(lens))]
    timer = PhaseTimer(torch.device("cpu"))
    return StartedRound(states, list(lens), timer, late=frozenset(late))


def test_a_round_is_idle_where_nobody_can_do_anything():
    assert make_round([0, 0], late=[0, 1]).is_idle
    assert not make_round([0, 1], late=[0, 1]).is_idle
    assert not make_round([0, 0], late=[1]).is_idle
    assert make_round([3, 3, 3], late=[1]).verify == [0, 2]


def test_who_was_late_when_a_round_began_is_asked_again_in_another_batch():
    started = make_round([2, 2], late=[0])
    now = started.for_batch(started.states[::-1])
    assert now.late == frozenset()
