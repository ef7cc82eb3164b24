"""Requests in SGLang's queue that wait for pages of their prefix, or start on its anchors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_kvspec.adapters import early_start
from sglang_kvspec.adapters.early_start import may_start_early
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.adapters.transfer.decoding import NEWS_WAIT_S
from sglang_kvspec.runtime.remote_prefixes import WaitingRequests


def new_batch(original: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    """Run Scheduler.get_new_batch_prefill without the requests that wait for their prefix."""
    cache = scheduler.tree_cache
    if not isinstance(cache, KVSpecRadixCache):
        return original(scheduler, *args, **kwargs)
    if cache.early is not None:
        early_start.keep_up(scheduler, cache, args[0])
    with cache.in_pass(lambda: scheduler.waiting_queue):
        if cache.waiting is None:
            return original(scheduler, *args, **kwargs)
        return _without_waiting(original, scheduler, cache.waiting, args, kwargs)


def _without_waiting(
    original: Callable[..., Any], scheduler: Any, waiting: WaitingRequests, args: Any, kwargs: Any
) -> Any:
    cache, queue = scheduler.tree_cache, list(scheduler.waiting_queue)
    _ask(cache, waiting, [req for req in queue if not waiting.has_asked(req.rid)])
    held = waiting.awaited([req.rid for req in queue])
    scheduler.waiting_queue = [req for req in queue if req.rid not in held]
    starting = None
    if cache.early is not None and not scheduler.waiting_queue:
        starting = early_start.next_to_start(scheduler, cache, args[0], queue)
    try:
        if starting is None:
            return original(scheduler, *args, **kwargs)
        held.discard(starting.rid)
        return early_start.admit(original, scheduler, cache, starting, args, kwargs)
    finally:
        left = scheduler.waiting_queue
        stays = held | {req.rid for req in left}
        old = {req.rid for req in queue}
        scheduler.waiting_queue = [
            *(req for req in queue if req.rid in stays),
            *(req for req in left if req.rid not in old),
        ]
        # Requests that started on anchors stay: their residuals may still come.
        waiting.retain(stays.union(cache.early.rids if cache.early is not None else ()))


def _ask(cache: KVSpecRadixCache, waiting: WaitingRequests, new: Sequence[Any]) -> None:
    early = [req.rid for req in new if cache.early is not None and may_start_early(req)]
    waiting.ask({req.rid: cache.look_up(req).links for req in new}, anchors_first=early)


def wait_when_idle(scheduler: Any) -> bool:
    """Wait for news from the prefix server while no batch runs. Return False, without a wait, if no
    request can be waiting for pages."""
    cache = scheduler.tree_cache
    waiting = cache.waiting if isinstance(cache, KVSpecRadixCache) else None
    if waiting is None or not scheduler.waiting_queue:
        return False
    waiting.wait_for_news(NEWS_WAIT_S)
    return True
