"""Properties of one planned iteration."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.planning.step import (
    FETCH_HORIZON,
    MAX_WAIT_ITERATIONS,
    RequestView,
    StepBudget,
    plan_step,
)

ROOMY = StepBudget(fetch_pages=100, free_cache_pages=100, cache_pages=100)


def view(index=0, *, num_drafts=0, due_len=4, cap_len=8, **fields):
    return RequestView(index, num_drafts, due_len, cap_len, **fields)


def next_use(situation):
    """Iterations until the first request needs each cached page."""
    uses = dict.fromkeys(situation.budget.idle_resident, inf)
    for request in situation.requests:
        for page in request.resident:
            uses[page] = min(uses.get(page, inf), request.due_in)
    return uses


@given(data=st.data())
def test_every_request_does_exactly_one_thing(data, situation_strategy):
    requests, budget = data.draw(situation_strategy)
    plan = plan_step(requests, budget)
    assert sorted(plan.draft + plan.verify + plan.wait) == [r.index for r in requests]


@given(data=st.data())
def test_drafts_stop_at_the_cap_and_verifications_are_due(data, situation_strategy):
    requests, budget = data.draw(situation_strategy)
    plan = plan_step(requests, budget)
    for request in requests:
        if request.index in plan.draft:
            assert request.num_drafts < request.cap_len
        else:
            assert request.due_in == 0
        if request.index in plan.wait:
            assert request.num_drafts == request.cap_len
            assert request.waited < MAX_WAIT_ITERATIONS
            assert request.missing or request.num_arriving


@given(data=st.data())
def test_a_verification_has_its_residuals_or_a_reason_to_stream(data, situation_strategy):
    requests, budget = data.draw(situation_strategy)
    plan = plan_step(requests, budget)
    for request in (r for r in requests if r.index in plan.verify):
        complete = not request.missing and not request.num_arriving
        too_large = request.num_encoded > budget.cache_pages
        assert complete or too_large or request.waited >= MAX_WAIT_ITERATIONS


@given(data=st.data())
def test_fetches_fit_the_link_and_the_cache(data, situation_strategy):
    requests, budget = data.draw(situation_strategy)
    plan = plan_step(requests, budget)
    missing = {page for r in requests for page in r.missing}
    assert len(plan.fetch) <= budget.fetch_pages
    assert len(plan.fetch) <= budget.free_cache_pages + len(plan.evict)
    assert len(set(plan.fetch)) == len(plan.fetch)
    assert set(plan.fetch) <= missing


@given(data=st.data())
def test_only_cached_pages_leave_and_only_for_a_fetch(data, situation_strategy):
    situation = data.draw(situation_strategy)
    plan = plan_step(*situation)
    assert len(set(plan.evict)) == len(plan.evict)
    assert set(plan.evict) <= set(next_use(situation))
    assert len(plan.evict) <= max(0, len(plan.fetch) - situation.budget.free_cache_pages)


@given(data=st.data())
def test_no_page_leaves_that_is_needed_as_soon_as_the_one_that_enters(data, situation_strategy):
    situation = data.draw(situation_strategy)
    plan = plan_step(*situation)
    uses = next_use(situation)
    needed_room = plan.fetch[situation.budget.free_cache_pages :]
    for page, victim in zip(needed_room, plan.evict, strict=True):
        wanted_in = min(r.due_in for r in situation.requests if page in r.missing)
        assert uses[victim] > wanted_in


@given(data=st.data())
def test_the_pages_used_latest_leave_first(data, situation_strategy):
    situation = data.draw(situation_strategy)
    plan = plan_step(*situation)
    uses = next_use(situation)
    kept = [uses[page] for page in set(uses) - set(plan.evict)]
    if plan.evict and kept:
        assert min(uses[page] for page in plan.evict) >= max(kept)


@given(data=st.data())
def test_fetches_serve_the_soonest_verifications_first(data, situation_strategy):
    situation = data.draw(situation_strategy)
    plan = plan_step(*situation)
    wanted_in = [
        min(
            r.due_in
            for r in situation.requests
            if page in r.missing and r.num_encoded <= situation.budget.cache_pages
        )
        for page in plan.fetch
    ]
    assert wanted_in == sorted(wanted_in)
    assert all(due <= FETCH_HORIZON for due in wanted_in)


@given(data=st.data())
def test_requests_larger_than_the_cache_stream_and_fetch_nothing_for_themselves(
    data, situation_strategy
):
    requests, budget = data.draw(situation_strategy)
    plan = plan_step(requests, budget)
    fitting = {p for r in requests if r.num_encoded <= budget.cache_pages for p in r.missing}
    assert set(plan.fetch) <= fitting
    for request in requests:
        if request.num_encoded > budget.cache_pages and request.due_in == 0:
            assert request.index in plan.verify


@given(data=st.data())
def test_is_deterministic_and_blind_to_order(data, situation_strategy):
    requests, budget = data.draw(situation_strategy)
    plan = plan_step(requests, budget)
    assert plan_step(list(requests), budget) == plan
    shuffled = list(requests)
    random.Random(0).shuffle(shuffled)
    other = plan_step(shuffled, budget)
    for name in ("draft", "verify", "wait"):
        assert sorted(getattr(other, name)) == sorted(getattr(plan, name))
    assert (other.fetch, other.evict) == (plan.fetch, plan.evict)


@given(data=st.data(), late=st.integers(0, 3), waited=st.integers(0, 20))
def test_a_late_request_changes_nothing_for_others(data, late, waited, situation_strategy):
    requests, budget = data.draw(situation_strategy)
    joined = view(
        len(requests), num_drafts=4 + late, cap_len=7, waited=waited, num_arriving=late + 1
    )
    alone = plan_step(requests, budget)
    plan = plan_step([*requests, joined], budget)
    for name in ("draft", "verify", "wait"):
        others = tuple(i for i in getattr(plan, name) if i != joined.index)
        assert others == getattr(alone, name)


def test_a_late_request_drafts_on_waits_at_its_cap_and_then_streams():
    late = view(num_drafts=4, due_len=4, cap_len=6, missing=(1,))
    assert plan_step([late], ROOMY).draft == (0,)
    assert plan_step([replace(late, num_drafts=5)], ROOMY).draft == (0,)
    at_cap = replace(late, num_drafts=6)
    assert plan_step([at_cap], ROOMY).wait == (0,)
    assert plan_step([replace(at_cap, waited=MAX_WAIT_ITERATIONS - 1)], ROOMY).wait == (0,)
    assert plan_step([replace(at_cap, waited=MAX_WAIT_ITERATIONS)], ROOMY).verify == (0,)


def test_pages_on_their_way_count_as_missing():
    arriving = view(num_drafts=8, num_arriving=1)
    assert plan_step([arriving], ROOMY).wait == (0,)
    assert plan_step([replace(arriving, num_arriving=0)], ROOMY).verify == (0,)


def test_a_request_with_nothing_left_to_draft_verifies_at_once():
    assert plan_step([view(cap_len=0)], ROOMY).verify == (0,)


def test_no_requests_no_plan():
    plan = plan_step([], replace(ROOMY, idle_resident=(1, 2)))
    assert plan == type(plan)((), (), (), (), ())


def test_nothing_is_fetched_for_a_verification_far_away():
    far = view(due_len=FETCH_HORIZON + 1, cap_len=64, missing=(1,))
    assert plan_step([far], ROOMY).fetch == ()
    assert plan_step([replace(far, num_drafts=1)], ROOMY).fetch == (1,)


def test_pages_of_no_running_request_leave_first_then_those_used_latest():
    requests = [
        view(0, num_drafts=4, missing=(1, 2, 3)),
        view(1, due_len=7, resident=(10, 11)),
        view(2, due_len=3, resident=(12,)),
    ]
    budget = StepBudget(fetch_pages=8, free_cache_pages=0, cache_pages=4, idle_resident=(20,))
    plan = plan_step(requests, budget)
    assert plan.fetch == (1, 2, 3)
    assert plan.evict == (20, 10, 11)


def test_a_page_shared_by_several_is_fetched_once_and_kept_for_the_soonest():
    requests = [view(i, num_drafts=i, missing=(1, 2)) for i in range(3)]
    assert plan_step(requests, ROOMY).fetch == (1, 2)
    shared = [
        view(0, num_drafts=4, missing=(1,)),
        view(1, num_drafts=4, resident=(5,)),
        view(2, due_len=8, resident=(5, 6)),
    ]
    budget = StepBudget(fetch_pages=8, free_cache_pages=0, cache_pages=2)
    assert plan_step(shared, budget).evict == (6,)


@pytest.mark.parametrize("fetch_pages", [1, 2, 5])
def test_the_link_bounds_what_moves(fetch_pages):
    plan = plan_step([view(missing=tuple(range(9)))], replace(ROOMY, fetch_pages=fetch_pages))
    assert plan.fetch == tuple(range(fetch_pages))
