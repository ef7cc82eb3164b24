"""Decisions for SGLang's scheduler: which requests start, which are retracted, and the longest
request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult

from kvspec_patches import retraction_order
from sglang_kvspec.adapters import scheduling
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.pressure import Pressure

PAGE, RESERVE = 64, 66


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "get_alloc_reserve_per_decode", lambda: RESERVE)
    monkeypatch.setattr(scheduling, "priority_of", lambda req: req.priority)


def make_request(
    num_prompt: int, *, max_new: int = 32, finished: bool = False, prefix: int = 0
) -> SimpleNamespace:
    """Make a running request or, before it has pages, a waiting one."""
    return SimpleNamespace(
        finished=lambda: finished,
        kv=SimpleNamespace(kv_allocated_len=num_prompt, kv_committed_len=num_prompt),
        kv_committed_len=num_prompt,
        prefix_indices=torch.zeros(prefix),
        prefix_len=prefix,
        full_untruncated_fill_ids=range(num_prompt),
        sampling_params=SimpleNamespace(max_new_tokens=max_new),
        output_ids=[],
        last_node=object(),
    )


class Adder:
    """SGLang's PrefillAdder over a pool of `free` free pages and `cached` ones. Locking the
    request's prefix takes `own` of the cached pages."""

    page_size = PAGE

    def __init__(self, running: list[Any], *, free: int, cached: int = 0, own: int = 0) -> None:
        self.pressure = Pressure()
        pool = SimpleNamespace(pressure=self.pressure)
        self.token_to_kv_pool_allocator = SimpleNamespace(
            available_size=lambda: free * PAGE, get_kvcache=lambda: pool
        )
        self.running_batch = SimpleNamespace(reqs=running)
        self.can_run_list: list[Any] = []
        self._cached, self._own, self._is_locked = cached, own, False
        self.tree_cache = SimpleNamespace(evictable_size=lambda: self._evictable * PAGE)

    @property
    def _evictable(self) -> int:
        return self._cached - self._own * self._is_locked

    @contextmanager
    def _lock_node(self, node: Any) -> Iterator[None]:
        self._is_locked = True
        yield
        self._is_locked = False

    def add(self, req: Any, *args: Any) -> AddReqResult:
        """Admit every request, as SGLang's own method does."""
        self.can_run_list.append(req)
        return AddReqResult.CONTINUE

    def offer(self, req: Any) -> bool:
        result = scheduling.add_if_it_fits(Adder.add, self, req, (False, None), {})
        assert (result is AddReqResult.CONTINUE) == (req in self.can_run_list)
        assert self.pressure.held_back == (result is AddReqResult.NO_TOKEN)
        return result is AddReqResult.CONTINUE


def test_a_request_starts_where_all_requests_have_pages_to_grow() -> None:
    # A running request of 100 tokens in two pages may grow to 100 + 32 + 64: two more pages. The
    # new request of 300 tokens needs seven.
    for free, fits in ((9, True), (8, False)):
        assert Adder([make_request(100)], free=free).offer(make_request(300)) is fits


def test_what_is_cached_counts_unless_the_request_itself_uses_it() -> None:
    running, new = [make_request(100)], make_request(300, prefix=128)
    # The new request has seven pages, of which two are cached. It needs five, and the running
    # request needs two.
    assert Adder(running, free=3, cached=6, own=2).offer(new)
    assert not Adder(running, free=3, cached=5, own=2).offer(new)


def test_requests_that_start_together_count_and_finished_ones_do_not() -> None:
    together = Adder([], free=13)
    assert together.offer(make_request(300))
    assert not together.offer(make_request(300))
    assert Adder([make_request(1000, finished=True)], free=0).offer(make_request(300))


def test_the_first_request_always_starts() -> None:
    assert Adder([], free=1).offer(make_request(10_000))


def make_running(priority: int = 0, pages: tuple[int, ...] = (1, 2)) -> SimpleNamespace:
    return SimpleNamespace(
        priority=priority,
        retraction_count=0,
        output_ids=[1],
        origin_input_ids=[1],
        kv_committed_len=len(pages) * PAGE,
        pages=pages,
    )


class Batch:
    def __init__(self, reqs: list[Any], states: dict[int, ResidualState], *, is_full: bool) -> None:
        self.reqs, self._is_full = reqs, is_full
        table = SimpleNamespace(state=states.__getitem__)
        kv = SimpleNamespace(
            geometry=SimpleNamespace(page_size=PAGE), residuals=SimpleNamespace(table=table)
        )
        self.pool = SimpleNamespace(kv=kv, pressure=Pressure())
        self.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: self.pool)
        rows = [torch.tensor(req.pages).repeat_interleave(PAGE) * PAGE for req in reqs]
        for index, req in enumerate(reqs):
            req.req_pool_idx = index
            # Since 0.5.19 SGLang keeps the row and the lengths in here.
            req.kv = req
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.stack(rows))

    def check_decode_mem(self) -> bool:
        return not self._is_full


def retract_one(batch: Batch, server_args: Any) -> tuple[list[Any], float, list[Any]]:
    order = retraction_order.hook(lambda *args: [0, 1], batch.reqs, server_args)
    return [batch.reqs[order[-1]]], 0.5, []


STORED, RESIDENT, FETCHING = (
    ResidualState.STORED,
    ResidualState.RESIDENT,
    ResidualState.FETCHING,
)


@pytest.mark.parametrize(
    ("first", "second", "priority", "victim"),
    [
        ((STORED, STORED), (RESIDENT, RESIDENT), 0, 0),
        ((RESIDENT, FETCHING), (STORED, STORED), 0, 1),
        ((STORED, STORED), (RESIDENT, RESIDENT), 1, 1),
    ],
    ids=["far first", "on its way is near", "priority counts more"],
)
def test_the_farthest_request_of_the_lowest_priority_is_retracted(
    first: Any, second: Any, priority: int, victim: int
) -> None:
    reqs = [make_running(priority, (1, 2)), make_running(0, (3, 4))]
    states = dict(zip((1, 2, 3, 4), (*first, *second), strict=True))
    batch = Batch(reqs, states, is_full=True)
    retracted, ratio, failed = scheduling.retract(retract_one, batch, (None,))
    assert (retracted, ratio, failed) == ([reqs[victim]], 0.5, [])
    assert batch.pool.pressure.report()["retracted"] == {"memory": 1, "priority": 0, "test": 0}


def test_a_retraction_without_need_counts_as_one_for_a_test() -> None:
    batch = Batch([make_running()], dict.fromkeys((1, 2), STORED), is_full=False)
    scheduling.retract(lambda batch: (batch.reqs, 0.5, []), batch, ())
    assert batch.pool.pressure.report()["retracted"] == {"memory": 0, "priority": 0, "test": 1}


def test_the_order_is_sglangs_own_for_others() -> None:
    def own(reqs: list[Any], server_args: str, *, allow_policy_sort: bool) -> list[Any]:
        return [*reqs, server_args, allow_policy_sort]

    # As SGLang 0.5.16 calls it.
    assert retraction_order.hook(own, [7], "args", allow_policy_sort=False) == [7, "args", False]
    assert retraction_order.hook(lambda reqs: reqs, [7]) == [7]


def test_no_request_is_longer_than_the_pool_holds_with_its_drafts() -> None:
    rest = ("seed", "cpu", None, 8, 9, 10)
    # Order: pool, prefill, running, queued, then the longest request and prompt.
    info = (4096, 1, 2, 3, 4095, 4090, *rest)
    assert scheduling.shorten_requests(info) == (4096, 1, 2, 3, 4030, 4025, *rest)
    limited_by_context = (4096, 1, 2, 3, 2047, 2042, *rest)
    assert scheduling.shorten_requests(limited_by_context) == limited_by_context
    with pytest.raises(ConfigError, match=r"a KV pool of 64 tokens .*--kvspec-host-gb"):
        scheduling.shorten_requests((64, 1, 2, 3, 63, 58, *rest))
