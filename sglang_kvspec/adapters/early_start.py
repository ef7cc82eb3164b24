"""Requests that start on anchors from a prefix server, in SGLang's queue and running batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache

logger = logging.getLogger(__name__)


def may_start_early(req: Any) -> bool:
    """Return True if a request's own fields allow a start on anchors: it has no output yet, can
    emit more than one token, and asks for no grammar and no log-probabilities."""
    return (
        not req.output_ids
        and req.sampling_params.max_new_tokens > 1
        and req.grammar is None
        and not req.return_logprob
    )


def keep_up(scheduler: Any, cache: KVSpecRadixCache, running: Any) -> None:
    """Land residuals of running requests, before a pass of the scheduler. Requests whose residuals
    will not come go back to the queue, and their prefixes are computed."""
    early = cache.early
    if early is None or not early.rids:
        return
    complete, lost = early.land()
    for req in running.reqs:
        if req.rid in complete and not _is_ending(req):
            # SGLang itself sets this time only for prompts that it computes.
            req.time_stats.set_prefill_finished_time()
            cache.adopt(req)
    _take_back([r for r in running.reqs if r.rid in lost and not _is_ending(r)], scheduler, running)


def _take_back(lost: Sequence[Any], scheduler: Any, running: Any) -> None:
    """Retract running requests, as SGLang does when memory runs out. None has emitted a token."""
    cache = scheduler.tree_cache
    for num_before, req in enumerate(lost):
        logger.warning(
            "KVSpec: residuals of the prefix of request %s did not arrive: the request is "
            "retracted and starts again",
            req.rid,
        )
        place = running.reqs.index(req)
        running.release_req(place, len(running.reqs) - num_before, scheduler.server_args)
        cache.early.note_returned()
        # The anchors are still here, and another rank may still wait: do not start on them again.
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
    """Return the first request that can start on the anchors of its prefix; None if none can.

    held: requests that wait for their prefix, while no other request waits to start. Only one
    request starts for each prefix: others find it in the KV cache later.
    """
    early, waiting = cache.early, cache.waiting
    if early is None or waiting is None:
        return None
    if scheduler.chunked_req is not None or running.batch_is_full:
        return None
    able = {req.rid: req for req in held if may_start_early(req)}
    anchored = waiting.anchored(list(able), besides=set(early.rids))
    for rid, req in able.items():
        if rid in anchored:
            if cache.could_start(cache.look_up(req).links):
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
    """Run Scheduler.get_new_batch_prefill for this request alone, to start it on anchors."""
    scheduler.waiting_queue = [req]
    with cache.starting(req):
        plan = original(scheduler, *args, **kwargs)
    batch = plan.batch_to_run
    if batch is None:
        if cache.cancel_start():
            # SGLang did not admit the request although there was room: do not try again.
            assert cache.waiting is not None
            cache.waiting.await_whole_pages(req.rid)
    else:
        assert batch.reqs == [req], "an early start must be the only request of its batch"
        cache.detach(req)
    return plan
