"""Stepper: what the planner is told about requests and pools, and page movements applied."""

from __future__ import annotations

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.pools.residual_table import ResidualState
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.speeds import Speeds
from sglang_kvspec.runtime.stepper import Stepper


def pages(*ids):
    return torch.tensor(ids, dtype=torch.int64)


def until_verified(stepper, state, ids, most=100):
    """Iterations until the request verifies, drafting as it is told."""
    for now in range(most):
        plan = stepper.plan([state], [ids])
        if plan.verify:
            return now
        if plan.draft:
            state.drafts.append(0)
    raise AssertionError("it never verifies")


@pytest.mark.parametrize("draft_len", ["auto", 1, 5, 64])
def test_a_cycle_ends_before_every_cap(make_kv, draft_len):
    config = KVSpecConfig(draft_len=draft_len)
    for remaining in (100, 6, 3, 2):
        state = request_state(remaining=remaining)
        until_verified(Stepper(config, make_kv()), state, pages())
        assert 1 <= len(state.drafts) <= min(config.max_draft_len, remaining - 1)
    if draft_len != "auto":
        lone = request_state()
        until_verified(Stepper(config, make_kv()), lone, pages())
        assert len(lone.drafts) == draft_len


@pytest.mark.parametrize(("draft_len", "remaining"), [(0, 100), ("auto", 1), (8, 1)])
def test_with_nothing_to_draft_it_verifies_at_once(make_kv, draft_len, remaining):
    stepper = Stepper(KVSpecConfig(draft_len=draft_len), make_kv())
    assert stepper.plan([request_state(remaining=remaining)], [pages()]).verify == (0,)


def test_a_poor_drafter_verifies_sooner(make_kv):
    good, poor = request_state(), request_state()
    for _ in range(20):
        good.acceptance.observe(8, 8)
        poor.acceptance.observe(8, 0)
    for state in (good, poor):
        until_verified(Stepper(KVSpecConfig(stream="burst"), make_kv()), state, pages())
    assert len(poor.drafts) < len(good.drafts)


@pytest.mark.parametrize(("last_emitted", "longest"), [(1, 1), (2, 2), (4, 5), (5, 6), (20, 6)])
def test_paced_tokens_fill_the_time_until_the_next_verification(make_kv, last_emitted, longest):
    paced, burst = request_state(), request_state()
    for stream, state in (("paced", paced), ("burst", burst)):
        state.is_streamed, state.last_emitted = True, last_emitted
        for _ in range(20):
            state.acceptance.observe(30, 30)
        until_verified(Stepper(KVSpecConfig(stream=stream), make_kv()), state, pages())
    assert len(paced.drafts) == longest < len(burst.drafts)


def test_a_cycle_is_expected_to_take_its_drafts_and_the_verification(make_kv):
    stepper, state = Stepper(KVSpecConfig(draft_len=5), make_kv()), request_state()
    assert stepper.cycle_s(state) == pytest.approx(6 * stepper.speeds.iteration_s)


def test_missing_pages_are_fetched_before_the_verification(encoded):
    kv = encoded(3, cache_pages=3)
    kv.residuals.evict([1, 2, 3])
    stepper = Stepper(KVSpecConfig(draft_len=4), kv)
    state = request_state()
    assert until_verified(stepper, state, pages(1, 2, 3)) == 4
    assert kv.residuals.bytes_fetched == 3 * kv.plan.page_bytes.residual
    assert [kv.residuals.table.state(page) for page in (1, 2, 3)] == [ResidualState.RESIDENT] * 3
    kv.check_integrity()


def test_cached_pages_of_finished_requests_make_way(encoded):
    kv = encoded(4, cache_pages=2)
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    until_verified(stepper, request_state(), pages(3, 4))
    assert sorted(kv.residuals.cache_slots) == [3, 4]
    kv.check_integrity()


@pytest.mark.parametrize("options", [{"cache_pages": 0}, {"store": False}])
def test_where_pages_cannot_move_nothing_is_planned(encoded, options):
    kv = encoded(4, **options)
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    assert until_verified(stepper, request_state(), pages(1, 2, 3, 4)) == 1
    assert kv.residuals.bytes_fetched == 0


def test_more_pages_than_the_cache_holds_are_streamed(encoded):
    kv = encoded(4, cache_pages=3)
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    assert until_verified(stepper, request_state(), pages(1, 2, 3, 4)) == 1
    assert kv.residuals.bytes_fetched == 0


def test_pages_in_the_window_need_no_residuals(encoded):
    kv = encoded(1, cache_pages=1)
    kv.open_pages([5, 6])
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    assert until_verified(stepper, request_state(), pages(1, 5, 6)) == 1
    assert kv.residuals.bytes_fetched == 0


def link_of(kv, stepper, pages_per_iteration):
    """Have the stepper see fetches and iterations of such a speed."""
    # Half a page more, so that rounding does not count.
    num_bytes = (1000 * pages_per_iteration + 500) * kv.plan.page_bytes.residual
    kv.residuals.take_fetch_times = lambda: [(num_bytes, 10.0)] * 3
    for _ in range(3):
        stepper.speeds.note_iteration(0.01)


def test_a_verification_is_placed_where_the_link_can_serve_it(encoded):
    """Three pages over a link of one an iteration: three iterations, not the one asked for."""
    kv = encoded(3, cache_pages=3)
    kv.residuals.evict([1, 2, 3])
    state = request_state()
    state.acceptance.accepted, state.acceptance.rejected = 0.0, 100.0
    stepper = Stepper(KVSpecConfig(), kv)
    link_of(kv, stepper, 1)
    assert until_verified(stepper, state, pages(1, 2, 3)) == 3


def test_fetches_are_timed_by_themselves(encoded):
    kv = encoded(3, cache_pages=3)
    kv.residuals.evict([1, 2, 3])
    kv.residuals.start_fetch([1, 2])
    ((num_bytes, seconds),) = kv.residuals.take_fetch_times()
    assert num_bytes == 2 * kv.plan.page_bytes.residual
    assert seconds > 0
    assert kv.residuals.take_fetch_times() == []


def test_the_link_of_the_first_rank_counts(encoded):
    """This rank sees a link of nine pages an iteration, the first rank one of one."""
    kv = encoded(3, cache_pages=3)
    kv.residuals.evict([1, 2, 3])
    state = request_state()
    state.acceptance.accepted, state.acceptance.rejected = 0.0, 100.0
    sent = []

    class Second(Ranks):
        def numbers(self, mine, about):
            sent.append((list(mine), list(about)))
            return [1]

    stepper = Stepper(KVSpecConfig(), kv, Second(1, 2))
    link_of(kv, stepper, 9)
    assert until_verified(stepper, state, pages(1, 2, 3)) == 3
    assert sent[0] == ([9], [("r", 64)])


def test_small_changes_of_the_link_move_nothing(encoded):
    kv = encoded(3, cache_pages=2)
    seen = []

    class Telling(Ranks):
        def numbers(self, mine, about):
            seen.extend(mine)
            return list(mine)

    stepper = Stepper(KVSpecConfig(), kv, Telling())
    for speed in (100, 104, 96, 200):
        stepper.speeds = Speeds(kv.residuals)
        link_of(kv, stepper, speed)
        stepper.plan([request_state()], [pages(1)])
    assert seen == [100, 100, 100, 200]


def test_pages_freed_while_they_are_fetched_do_not_come_back(encoded):
    kv = encoded(2, cache_pages=2)
    kv.residuals.evict([1, 2])
    stepper = Stepper(KVSpecConfig(draft_len=1), kv)
    stepper.plan([request_state(rid="a"), request_state(rid="b")], [pages(1), pages(2)])
    kv.free_pages([1])
    assert until_verified(stepper, request_state(rid="b"), pages(2)) <= 1
    assert kv.residuals.cache_slots.num_free == 1
    kv.check_integrity()


def test_two_requests_that_crowd_the_cache_both_go_on(encoded):
    """Neither may evict the other's pages while both are due: one streams in the end."""
    kv = encoded(4, cache_pages=3)
    stepper = Stepper(KVSpecConfig(draft_len=0), kv)
    states = [request_state(rid="a"), request_state(rid="b")]
    for _ in range(20):
        assert stepper.plan(states, [pages(1, 2), pages(3, 4)]).verify == (0, 1)
        kv.check_integrity()


@pytest.mark.parametrize("num_drafts", [0, 5, 64])
def test_late_residuals_are_verified_with_as_soon_as_they_are_there(make_kv, num_drafts):
    """As where another server sends them (Lynx section 4.2)."""
    kv = make_kv()
    k = torch.randn((2, 32, 2, 16), generator=torch.Generator().manual_seed(0))
    kv.begin_encode([1, 2])
    kv.encode(0, torch.tensor([1, 2]), k, k)
    kv.finish_anchors([1, 2])
    stepper, state = Stepper(KVSpecConfig(draft_len=64), kv), request_state()
    for _ in range(num_drafts):
        assert stepper.plan([state], [pages(1, 2)]).draft == (0,)
        state.drafts.append(0)
    if num_drafts == 64:
        assert stepper.plan([state], [pages(1, 2)]).wait == (0,)
    kv.residuals.finish([1])
    waiting = stepper.plan([state], [pages(1, 2)])
    assert not waiting.verify
    if waiting.draft:
        state.drafts.append(0)
    kv.residuals.finish([2])
    assert until_verified(stepper, state, pages(1, 2)) <= 1
    assert len(state.drafts) <= num_drafts + 2
    # From then on it drafts as any other.
    state.commit([0])
    until_verified(stepper, state, pages(1, 2))
    assert len(state.drafts) == 64


def with_tail(num_drafts):
    """Of a request that has started on anchors."""
    state = request_state(num_drafts=num_drafts)
    state.tail.append(0)
    state.has_waited = True
    return state


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_what_started_on_anchors_verifies_as_soon_as_residuals_are_here(encoded, num_drafts):
    kv = encoded(1)
    kv.begin_landing([2])
    kv.finish_anchors([2])
    state = with_tail(num_drafts)
    stepper = Stepper(KVSpecConfig(), kv)
    for _ in range(3):
        assert stepper.plan([state], [pages(1, 2)]).draft == (0,)
        state.drafts.append(0)
    kv.residuals.finish([2])
    # A place for it may be an iteration away.
    assert until_verified(stepper, state, pages(1, 2)) <= 1


def test_what_started_on_anchors_drafts_nothing_where_residuals_are_here_at_once(encoded):
    stepper = Stepper(KVSpecConfig(), encoded(1))
    assert stepper.plan([with_tail(0)], [pages(1)]).verify == (0,)
