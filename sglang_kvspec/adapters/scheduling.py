"""Admission and retraction of requests in SGLang's scheduler, by KVSpec's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from sglang_kvspec.adapters.compat.matched_prefix import prefix_len
from sglang_kvspec.adapters.compat.request_kv import kv_of
from sglang_kvspec.adapters.compat.scheduling import AddReqResult, get_alloc_reserve_per_decode
from sglang_kvspec.adapters.prefix_cache import NOTHING, KVSpecRadixCache
from sglang_kvspec.adapters.requests import priority_of
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.planning.admission import Admission, PageNeed
from sglang_kvspec.planning.retraction import RetractionView, keep_order
from sglang_kvspec.runtime.pressure import Pressure

# Batch of the retraction under way. SGLang sorts requests without it, but it knows their pages.
_retracting: ContextVar[Any] = ContextVar("kvspec_retracting", default=None)


def pressure_of(allocator: Any) -> Pressure:
    pressure: Pressure = allocator.get_kvcache().pressure
    return pressure


def shorten_requests(worker_info: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result of TpModelWorker.get_worker_info with shorter lengths of requests and
    prompts: the pool must also hold the slots that are reserved behind them. Raises ConfigError if
    the pool is too small for one request."""
    pool_tokens, prefill, running, queued, req_len, input_len, *rest = worker_info
    longest = min(req_len, pool_tokens - get_alloc_reserve_per_decode())
    if longest < 1:
        raise ConfigError(
            f"a KV pool of {pool_tokens} tokens cannot hold one request and its drafts: raise "
            "--kvspec-host-gb, --mem-fraction-static or --max-total-tokens"
        )
    lengths = (longest, longest - (req_len - input_len))
    return (pool_tokens, prefill, running, queued, *lengths, *rest)


def add_if_it_fits(add: Callable[..., Any], adder: Any, req: Any, args: Any, kwargs: Any) -> Any:
    """Run PrefillAdder.add_one_req, or return NO_TOKEN if pages would soon run out."""
    pressure = pressure_of(adder.token_to_kv_pool_allocator)
    if not _has_room(adder, req):
        pressure.note_decision(lacks_pages=True)
        return AddReqResult.NO_TOKEN
    num_added = len(adder.can_run_list)
    result = _add(add, adder, req, args, kwargs)
    is_added = len(adder.can_run_list) > num_added
    pressure.note_decision(lacks_pages=not is_added and result == AddReqResult.NO_TOKEN)
    return result


def _add(add: Callable[..., Any], adder: Any, req: Any, args: Any, kwargs: Any) -> Any:
    """Run PrefillAdder.add_one_req. Where SGLang takes whole hits only, run it again for a request
    of whose prefix a part came from the tiers: the request finds that part in the tree."""
    result, tree, parts = add(adder, req, *args, **kwargs), adder.tree_cache, NOTHING
    while isinstance(tree, KVSpecRadixCache) and (part := tree.take_part()) is not None:
        parts = parts.plus(part)
        req.init_next_round_input(tree)
        result = add(adder, req, *args, **kwargs)
    if parts.num_pages and adder.can_run_list[-1:] == [req]:
        tree.count_parts(req, parts)
    return result


def _has_room(adder: Any, req: Any) -> bool:
    allocator, tree, size = adder.token_to_kv_pool_allocator, adder.tree_cache, adder.page_size
    intake = Admission(size, get_alloc_reserve_per_decode())
    others = [
        *_running(adder.running_batch, size),
        *(_starting(r, size) for r in adder.can_run_list),
    ]
    # Locked, the request's own cached prefix does not count as evictable.
    with adder._lock_node(req.last_node):
        free_pages = int(allocator.available_size() + tree.evictable_size()) // size
        return intake.has_room(_starting(req, size), others, free_pages)


def _running(batch: Any, page_size: int) -> Iterator[PageNeed]:
    for req in batch.reqs if batch is not None else ():
        # A finished request has freed its pages already.
        if not req.finished():
            held_pages = -(-req.kv.kv_allocated_len // page_size)
            yield PageNeed(held_pages, kv_of(req).kv_committed_len, _remaining(req))


def _starting(req: Any, page_size: int) -> PageNeed:
    held_pages = prefix_len(req) // page_size
    return PageNeed(held_pages, len(req.full_untruncated_fill_ids), _remaining(req))


def _remaining(req: Any) -> int:
    return int(req.sampling_params.max_new_tokens) - len(req.output_ids)


def retract(original: Callable[..., Any], batch: Any, args: Sequence[Any]) -> Any:
    """Run ScheduleBatch.retract_decode in KVSpec's order, and count the retractions."""
    reason = "test" if batch.check_decode_mem() else "memory"
    token = _retracting.set(batch)
    try:
        retracted, new_ratio, failed = original(batch, *args)
    finally:
        _retracting.reset(token)
    pressure = pressure_of(batch.token_to_kv_pool_allocator)
    pressure.note_retraction(reason, len(retracted), len(failed))
    return retracted, new_ratio, failed


def retraction_order(own_order: Callable[[], list[int]], reqs: Any) -> list[int]:
    """Return KVSpec's order for ScheduleBatch._get_decode_retraction_order inside of retract();
    outside of it, SGLang's own, which own_order() returns."""
    batch = _retracting.get()
    if batch is None:
        return own_order()
    return keep_order([_view(req, batch) for req in reqs])


def _view(req: Any, batch: Any) -> RetractionView:
    kv = batch.token_to_kv_pool_allocator.get_kvcache().kv
    size = kv.geometry.page_size
    held, rows = kv_of(req), batch.req_to_token_pool.req_to_token
    slots = rows[held.req_pool_idx, : held.kv_committed_len : size]
    states = [kv.residuals.table.state(page) for page in (slots // size).tolist()]
    near = sum(state in (ResidualState.RESIDENT, ResidualState.FETCHING) for state in states)
    return RetractionView(
        priority=priority_of(req),
        num_retractions=req.retraction_count,
        far_pages=states.count(ResidualState.STORED),
        near_pages=near,
        num_output=len(req.output_ids),
        num_prompt=len(req.origin_input_ids),
    )


def preempt(original: Callable[..., bool], adder: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Run PrefillAdder.preempt_to_schedule, and count the retractions."""
    before = len(adder.preempt_list)
    done = original(adder, *args, **kwargs)
    pressure = pressure_of(adder.token_to_kv_pool_allocator)
    pressure.note_retraction("priority", len(adder.preempt_list) - before)
    return done
