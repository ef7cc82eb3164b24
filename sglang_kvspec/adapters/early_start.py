"""Requests that start on anchors from a prefix server, in SGLang's queue and running batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache

logger = logging.getLogger(__name__)


def may_start_early(req: Any) -> bool:
    """Whether a request could, as far as it is for itself to say: it drafts, and nothing is asked
    for but tokens."""
    return (
        not req.output_ids
        and req.sampling_params.max_new_tokens > 1
        and req.grammar is None
        and not req.return_logprob
    )


def keep_up(scheduler: Any, cache: KVSpecRadixCache, running: Any) -> None:
    """Before a pass of the scheduler: what has come for requests of its running batch is put into
    place; those for which it will not come go back to the queue, to have it computed."""
    early = cache.early
    if early is None or not early.rids:
        return
    complete, lost = early.land()
    for req in running.reqs:
        if req.rid in complete and not _is_ending(req):
            # SGLang says so of prompts that are computed.
            req.time_stats.set_prefill_finished_time()
            cache.adopt(req)
    _take_back([r for r in running.reqs if r.rid in lost and not _is_ending(r)], scheduler, running)


def _take_back(lost: Sequence[Any], scheduler: Any, running: Any) -> None:
    """Retract running requests, as SGLang does for want of memory. They have emitted nothing."""
    cache = scheduler.tree_cache
    for num_before, req in enumerate(lost):
        logger.warning(
            "KVSpec: residuals of the prefix of request %s did not come: it starts anew", req.rid
        )
        place = running.reqs.index(req)
        running.release_req(place, len(running.reqs) - num_before, scheduler.server_args)
        cache.early.note_returned()
        # On another rank its wait may not be over, and its anchors are here still.
        cache.waiting.await_whole_pages(req.rid)
    if lost:
        running.filter_batch(keep_indices=[i for i, r in enumerate(running.reqs) if r not in lost])
        running.batch_is_full = False
    for req in lost:
        scheduler._add_request_to_queue(req, is_retracted=True)


def _is_ending(req: Any) -> bool:
    return req.finished() or req.to_finish is not None


def next_to_start(
    scheduler: Any, cache: KVSpecRadixCache, running: Any, held: Sequence[Any]
) -> Any:
    """The first of these requests, which wait for their prefix while nobody else waits to start, to
    have all anchors of it here; None where there is none, or no room. One for each prefix: others
    find it in the KV cache later."""
    early, waiting = cache.early, cache.waiting
    if early is None or waiting is None:
        return None
    if scheduler.chunked_req is not None or running.batch_is_full:
        return None
    able = {req.rid: req for req in held if may_start_early(req)}
    anchored = waiting.anchored(list(able), besides=set(early.rids))
    for rid, req in able.items():
        if rid in anchored:
            if cache.could_start(cache.lacking(req).links):
                return req
            waiting.await_whole_pages(rid)
    return None


def admit(
    original: Callable[..., Any],
    scheduler: Any,
    cache: KVSpecRadixCache,
    req: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Scheduler.get_new_batch_prefill for this request alone."""
    scheduler.waiting_queue = [req]
    with cache.starting(req):
        plan = original(scheduler, *args, **kwargs)
    batch = plan.batch_to_run
    if batch is None:
        if cache.cancel_start():
            # SGLang has no use for it although there is room, and will not have any.
            assert cache.waiting is not None
            cache.waiting.await_whole_pages(req.rid)
    else:
        assert batch.reqs == [req], "a request that starts on anchors is not alone"
        cache.keep_apart(req)
    return plan
