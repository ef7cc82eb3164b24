"""ResidualPlanner: its views of requests and pools, late requests, and applied page moves."""

from __future__ import annotations

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.planning.link_estimate import GUESSED_BYTES_PER_S
from sglang_kvspec.planning.round_plan import RoundBudget
from sglang_kvspec.planning.rounds import RoundCost

SIZE = 32
PLENTY = RoundBudget(100, 100)


def of_pages(rid, num_pages, num_drafts=0):
    return request_state(rid, committed_len=num_pages * SIZE, num_drafts=num_drafts)


def pages(*ids):
    return torch.tensor(ids, dtype=torch.int64)


def plan(planner, states, ids, lens, budget=PLENTY, held=()):
    return planner.plan(states, ids, lens, budget, held, drafts=any(lens))


@pytest.mark.parametrize("pools", [{"store": False}, {"cache_pages": 0}, {"cache_pages": 12}])
def test_all_requests_verify_where_nothing_moves(encoded, pools):
    kv = encoded(6, **pools)
    states = [of_pages("a", 3), of_pages("b", 3)]
    ids = [pages(1, 2, 3, 7), pages(4, 5, 6, 8)]
    planned = plan(ResidualPlanner(kv), states, ids, [4, 4])
    assert planned.verify == (0, 1)
    assert kv.residuals.bytes_fetched == 0


@pytest.mark.parametrize("pools", [{"store": False}, {"cache_pages": 4}])
def test_held_requests_do_not_verify(encoded, pools):
    kv = encoded(4, **pools)
    states, ids = [of_pages("a", 2), of_pages("b", 2)], [pages(1, 2, 5), pages(3, 4, 6)]
    planner = ResidualPlanner(kv)
    assert plan(planner, states, ids, [4, 4], held={0}).verify == (1,)
    assert plan(planner, states, ids, [4, 4], held=[0, 1]).verify == ()
    assert plan(planner, states, ids, [4, 4]).verify == (0, 1)


def test_pages_are_fetched_and_others_make_room(encoded):
    kv = encoded(6, cache_pages=4)
    planner, ids = ResidualPlanner(kv), [pages(5, 6, 7), pages(1, 2, 3, 4, 8)]
    states = [of_pages("a", 2), of_pages("b", 4)]
    # Four slots hold one request's pages at a time. Only verified pages count: 7 and 8 have no
    # residual.
    planned = plan(planner, states, ids, [4, 4])
    assert len(planned.verify) == 1
    planner.await_fetches(planned, ids)
    read = ids[planned.verify[0]][: len(ids[planned.verify[0]]) - 1].tolist()
    assert all(kv.residuals.table.state(page) is ResidualState.RESIDENT for page in read)
    other = plan(planner, states, ids, [0, 0])
    assert other.verify != planned.verify
    kv.check_integrity()


def test_requests_about_to_leave_are_not_planned_for(encoded):
    kv = encoded(6, cache_pages=3)
    planner, ids = ResidualPlanner(kv), [pages(1, 2, 7), pages(3, 4, 8), pages(5, 6, 9)]
    states = [of_pages("a", 2), of_pages("b", 2), of_pages("c", 2)]
    states[0].remaining = 0
    kv.residuals.evict(kv.residuals.table.pages_in(range(1, 7), ResidualState.RESIDENT))
    planned = planner.plan_ahead(states, ids, [4, 4, 4], PLENTY, drafts=True)
    # Indices of the plan are those of the batch.
    assert planned.verify == (1,)
    assert set(planned.fetch) == {3, 4}
    kv.check_integrity()


def test_held_requests_of_a_plan_made_ahead_are_those_of_the_batch(encoded):
    kv = encoded(6, cache_pages=3)
    planner, ids = ResidualPlanner(kv), [pages(1, 2, 7), pages(3, 4, 8), pages(5, 6, 9)]
    states = [of_pages("a", 2), of_pages("b", 2), of_pages("c", 2)]
    states[0].remaining = 0
    kv.residuals.evict(kv.residuals.table.pages_in(range(1, 7), ResidualState.RESIDENT))
    planned = planner.plan_ahead(states, ids, [4, 4, 4], PLENTY, held={1}, drafts=True)
    assert planned.verify == (2,)


def test_pages_of_later_rounds_are_fetched_once_no_other_forward_can_come(encoded):
    kv = encoded(6, cache_pages=5)
    planner, ids = ResidualPlanner(kv), [pages(1, 2, 7), pages(3, 4, 8), pages(5, 6, 9)]
    table = kv.residuals.table
    kv.residuals.evict(table.pages_in(range(1, 7), ResidualState.RESIDENT))
    budget = RoundBudget(2, 5)
    planned = planner.plan_ahead(
        [of_pages(r, 2) for r in "abc"], ids, [4, 4, 4], budget, drafts=True
    )
    assert len(planned.fetch) == 2
    assert len(planned.ahead) == 3
    assert set(table.pages_in(range(1, 7), ResidualState.STORED)) >= set(planned.ahead)
    # Another request has freed one page meanwhile, and the slot of another page is taken.
    kv.free_pages(planned.ahead[:1])
    planner.fetch_ahead(planned)
    assert not table.pages_in(planned.ahead, ResidualState.STORED)
    kv.check_integrity()


def test_a_cancelled_plan_takes_no_turn(encoded):
    kv = encoded(4, cache_pages=2)
    ids, states = [pages(1, 2, 5), pages(3, 4, 6)], [of_pages("a", 2), of_pages("b", 2)]
    planner = ResidualPlanner(kv)
    first = planner.plan_ahead(states, ids, [4, 4], PLENTY, drafts=True).verify
    planner.cancel()
    assert plan(planner, states, ids, [4, 4]).verify == first
    assert plan(planner, states, ids, [4, 4]).verify != first


def test_ranks_plan_alike_whose_fetches_end_at_different_times(encoded, monkeypatch):
    """The last stored pages are fetching on one rank, and resident on the other."""
    states, ids = [of_pages("a", 1), of_pages("b", 3)], [pages(1, 5), pages(2, 3, 4, 6)]
    budgets = [RoundBudget(0, 1), RoundBudget(0, 1), RoundBudget(0, 0)]
    plans = []
    for is_slow in (False, True):
        kv = encoded(4, cache_pages=4)
        kv.residuals.evict([4])
        planner = ResidualPlanner(kv)
        if is_slow:
            monkeypatch.setattr(kv.residuals, "finish_fetches", lambda: None)
        plans.append([plan(planner, states, ids, [4, 4], budget) for budget in budgets])
        assert kv.residuals.table.counts()["FETCHING"] == is_slow
        plans[-1].append(planner._planner._learnt)
    assert plans[0] == plans[1]


def test_room_is_kept_for_pages_that_verifications_fill(encoded):
    kv = encoded(4, cache_pages=4)
    ids = [pages(1, 2, 5, 6), pages(3, 4, 7, 8)]
    short = [of_pages("a", 2, num_drafts=3), of_pages("b", 2)]
    assert plan(ResidualPlanner(kv), short, ids, [27, 4]).verify == (0, 1)
    # With one more draft, the pending token's page becomes full.
    assert len(plan(ResidualPlanner(kv), short, ids, [28, 4]).verify) == 1


def test_the_budget_is_what_the_link_was_seen_to_move_meanwhile(encoded, monkeypatch):
    kv = encoded(1)
    page_bytes = kv.plan.page_bytes.residual
    cost = RoundCost(step=1.0, row=0.1, request=0.5, token=0.0)
    planner = ResidualPlanner(kv)
    assert planner.budget([3, 1], cost).round_pages == int(5.4 * GUESSED_BYTES_PER_S / page_bytes)
    # The link moved ten pages a second.
    fetches = [(1000 * page_bytes, 100.0)] * 3
    monkeypatch.setattr(kv.residuals, "take_fetch_times", lambda: fetches)
    # Drafts take 3 steps and 4 rows; then follow a step and two requests.
    assert planner.budget([3, 1], cost) == RoundBudget(34, 54)
    assert planner.budget([0, 0], cost) == RoundBudget(0, 20)
    assert planner.pages_in(2.05) == 20


# Requests whose residuals are still on the network


def land_anchors(kv, ids):
    """Land pages whose residuals have not arrived."""
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
def test_a_request_that_lacks_residuals_does_not_verify(arrived, pools):
    kv = arrived(**pools)
    planner = ResidualPlanner(kv)
    # Pages behind the verified tokens are still empty. The last request has one page of two.
    states = [of_pages("a", 1), of_pages("b", 2), of_pages("c", 2)]
    ids = [pages(1, 6), pages(2, 3, 7), pages(4, 5, 8)]
    late = planner.find_late(states, ids)
    assert late == {2}
    assert [state.has_waited for state in states] == [False, False, True]
    for _ in range(30):
        assert 2 not in plan(planner, states, ids, [4, 4, 4], held=late).verify
    kv.residuals.finish([4, 5])
    assert planner.find_late(states, ids) == frozenset()
    assert states[2].has_waited
    soon = [plan(planner, states, ids, [0, 0, 0]) for _ in range(12)]
    assert any(2 in planned.verify for planned in soon)


def test_one_missing_page_of_many_makes_a_request_late(arrived):
    kv = arrived(store=False)
    state = of_pages("a", 3)
    assert ResidualPlanner(kv).find_late([state], [pages(1, 4, 2)]) == {0}
    assert ResidualPlanner(kv).find_late([of_pages("b", 1)], [pages(1, 4)]) == frozenset()


def test_slots_of_landing_pages_make_no_room_for_a_fetch(encoded):
    kv = encoded(5, cache_pages=5)
    kv.residuals.evict([1, 2, 3, 4, 5])
    land_anchors(kv, [6])
    states = [of_pages("a", 3), of_pages("b", 2), of_pages("c", 1)]
    ids = [pages(1, 2, 3, 7), pages(4, 5, 8), pages(6, 9)]
    planner = ResidualPlanner(kv)
    late = planner.find_late(states, ids)
    assert late == {2}
    assert len(plan(planner, states, ids, [4, 4, 4], held=late).verify) == 1
    kv.check_integrity()
