"""SGLang's queue as the prefix cache has it: who waits for pages, and who is looked up together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.runtime.remote_prefixes import WaitingRequests

# How long an iteration in which nobody can go on waits for something to arrive; new requests of
# users wait as long.
_WAIT_S = 0.005


def new_batch(original: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    """Scheduler.get_new_batch_prefill, which does not see requests that wait for their prefix."""
    cache = scheduler.tree_cache
    if not isinstance(cache, KVSpecRadixCache):
        return original(scheduler, *args, **kwargs)
    with cache.in_pass(lambda: scheduler.waiting_queue):
        if cache.waiting is None:
            return original(scheduler, *args, **kwargs)
        return _without_waiting(original, scheduler, cache.waiting, args, kwargs)


def _without_waiting(
    original: Callable[..., Any], scheduler: Any, waiting: WaitingRequests, args: Any, kwargs: Any
) -> Any:
    queue = list(scheduler.waiting_queue)
    lacking = scheduler.tree_cache.lacking
    waiting.ask({req.rid: lacking(req).links for req in queue if not waiting.has_asked(req.rid)})
    held = waiting.awaited([req.rid for req in queue])
    scheduler.waiting_queue = [req for req in queue if req.rid not in held]
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        left = scheduler.waiting_queue
        stays = held | {req.rid for req in left}
        old = {req.rid for req in queue}
        scheduler.waiting_queue = [
            *(req for req in queue if req.rid in stays),
            *(req for req in left if req.rid not in old),
        ]
        waiting.retain(stays)


def wait_when_idle(scheduler: Any) -> bool:
    """No batch runs: somebody who is held back waits for the link, not for SGLang. Returns whether
    there is somebody who may be."""
    cache = scheduler.tree_cache
    waiting = cache.waiting if isinstance(cache, KVSpecRadixCache) else None
    if waiting is None or not scheduler.waiting_queue:
        return False
    waiting.wait_for_news(_WAIT_S)
    return True
