"""Stepper: what the planner is told about requests and pools, and page movements applied."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.planning.step import MAX_WAIT_ITERATIONS
from sglang_kvspec.runtime import stepper as stepper_module
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.stepper import Stepper


def make_state(remaining=100, due_len=0, num_drafts=0):
    return RequestState(
        rid="r",
        committed_len=64,
        pending=0,
        output=[0],
        params=SamplingParams(top_k=1),
        remaining=remaining,
        due_len=due_len,
        drafts=[0] * num_drafts,
    )


@pytest.fixture
def encoded(make_kv):
    """A pool whose pages 1..num_encoded are encoded; the first ones are in the cache."""

    def make(num_encoded, **options):
        kv = make_kv(**options)
        pages = list(range(1, num_encoded + 1))
        k = torch.randn((num_encoded, 32, 2, 16), generator=torch.Generator().manual_seed(0))
        kv.begin_encode(pages)
        kv.encode(0, torch.tensor(pages), k, k)
        kv.finish_encode(pages)
        return kv

    return make


def pages(*ids):
    return torch.tensor(ids, dtype=torch.int64)


@pytest.mark.parametrize("draft_len", ["auto", 1, 5, 64])
def test_a_cycle_ends_before_every_cap(make_kv, draft_len):
    config = KVSpecConfig(draft_len=draft_len)
    stepper = Stepper(config, make_kv())
    for remaining in (100, 6, 3, 2):
        state = make_state(remaining)
        stepper.start_cycle(state)
        assert 1 <= state.due_len <= min(config.max_draft_len, remaining - 1)
    if draft_len != "auto":
        lone = make_state()
        Stepper(config, make_kv()).start_cycle(lone)
        assert lone.due_len == draft_len


@pytest.mark.parametrize(("draft_len", "remaining"), [(0, 100), ("auto", 1), (8, 1)])
def test_with_nothing_to_draft_it_verifies_at_once(make_kv, draft_len, remaining):
    stepper = Stepper(KVSpecConfig(draft_len=draft_len), make_kv())
    state = make_state(remaining)
    stepper.start_cycle(state)
    assert state.due_len == 0
    assert stepper.plan([state], [pages()]).verify == (0,)


def test_requests_that_join_together_are_staggered(make_kv):
    stepper = Stepper(KVSpecConfig(), make_kv())
    states = [make_state() for _ in range(8)]
    for state in states:
        stepper.start_cycle(state, num_joining=8)
    assert len({state.due_len for state in states}) >= 7


def test_a_poor_drafter_verifies_sooner(make_kv):
    good, poor = make_state(), make_state()
    for _ in range(20):
        good.acceptance.observe(8, 8)
        poor.acceptance.observe(8, 0)
    for state in (good, poor):
        Stepper(KVSpecConfig(), make_kv()).start_cycle(state)
    assert poor.due_len < good.due_len


def test_missing_pages_are_fetched_and_verified_an_iteration_later(encoded):
    kv = encoded(3, cache_pages=3)
    kv.residuals.evict([1, 2, 3])
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    state = make_state(due_len=1, num_drafts=1)
    plan = stepper.plan([state], [pages(1, 2, 3)])
    assert (plan.fetch, plan.wait) == ((1, 2, 3), (0,))
    plan = stepper.plan([state], [pages(1, 2, 3)])
    assert (plan.fetch, plan.verify) == ((), (0,))
    assert kv.residuals.bytes_fetched == 3 * kv.plan.page_bytes.residual
    kv.check_integrity()


def test_cached_pages_of_finished_requests_make_way(encoded):
    kv = encoded(4, cache_pages=2)
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    plan = stepper.plan([make_state()], [pages(3, 4)])
    assert (plan.fetch, plan.evict) == ((3, 4), (1, 2))
    kv.check_integrity()


@pytest.mark.parametrize("options", [{"cache_pages": 0}, {"store": False}])
def test_where_pages_cannot_move_nothing_is_planned(encoded, options):
    kv = encoded(4, **options)
    plan = Stepper(KVSpecConfig(draft_len=1), kv).plan([make_state()], [pages(1, 2, 3, 4)])
    assert (plan.verify, plan.fetch, plan.evict) == ((0,), (), ())


def test_more_pages_than_the_cache_holds_are_streamed_at_once(encoded):
    kv = encoded(4, cache_pages=3)
    plan = Stepper(KVSpecConfig(draft_len=1), kv).plan([make_state()], [pages(1, 2, 3, 4)])
    assert (plan.verify, plan.fetch) == ((0,), ())


def test_pages_in_the_window_need_no_residuals(encoded):
    kv = encoded(1, cache_pages=1)
    kv.open_pages([5, 6])
    plan = Stepper(KVSpecConfig(draft_len=1), kv).plan([make_state()], [pages(1, 5, 6)])
    assert (plan.verify, plan.fetch) == ((0,), ())


def test_the_link_moves_a_bounded_number_of_pages_an_iteration(encoded, monkeypatch):
    kv = encoded(3, cache_pages=3)
    kv.residuals.evict([1, 2, 3])
    two_pages = 2 * kv.plan.page_bytes.residual
    monkeypatch.setattr(stepper_module, "FETCH_BYTES_PER_ITERATION", two_pages)
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    fetched = [stepper.plan([make_state()], [pages(1, 2, 3)]).fetch for _ in range(3)]
    assert fetched == [(1, 2), (3,), ()]


def test_pages_freed_while_they_are_fetched_do_not_come_back(encoded):
    kv = encoded(2, cache_pages=2)
    kv.residuals.evict([1, 2])
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    stepper.plan([make_state(), make_state()], [pages(1), pages(2)])
    kv.free_pages([1])
    plan = stepper.plan([make_state()], [pages(2)])
    assert plan.verify == (0,)
    assert kv.residuals.cache_slots.num_free == 1
    kv.check_integrity()


def test_two_requests_that_crowd_the_cache_both_go_on(encoded):
    """Neither may evict the other's pages while both are due: one streams in the end."""
    kv = encoded(4, cache_pages=3)
    stepper = Stepper(KVSpecConfig(draft_len=0), kv)
    states = [make_state(), make_state()]
    verified = [0, 0]
    for _ in range(4 * (MAX_WAIT_ITERATIONS + 1)):
        plan = stepper.plan(states, [pages(1, 2), pages(3, 4)])
        for index, state in enumerate(states):
            state.waited = state.waited + 1 if index in plan.wait else 0
            verified[index] += index in plan.verify
        kv.check_integrity()
    assert min(verified) >= 4
