"""Split the tokens of a batch into equal work items, on the device.

A request's past and tail are cut into units of BLOCK_N tokens. With U units in all, an item is
ceil(U / (num_items - batch_size)) units of one request. There are then at most num_items items for
any lengths of requests, so that launches depend on num_items alone. Items are numbered request
after request. Where ITEM_UNITS is not 0, an item is that many units instead, whatever the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def num_units(
    requests,
    mask,
    indptr_ptr,
    last_page_len_ptr,
    tail_lens_ptr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return (past_len, tail_len, units of the past, units of the tail) of requests. requests: a
    scalar or a vector."""
    begin = tl.load(indptr_ptr + requests, mask=mask, other=0)
    end = tl.load(indptr_ptr + requests + 1, mask=mask, other=0)
    last_page_len = tl.load(last_page_len_ptr + requests, mask=mask, other=0)
    past_len = tl.where(end > begin, (end - begin - 1) * PAGE_SIZE + last_page_len, 0)
    tail_len = past_len * 0
    if tail_lens_ptr is not None:
        tail_len = tl.load(tail_lens_ptr + requests, mask=mask, other=0)
    past_units = (past_len + BLOCK_N - 1) // BLOCK_N
    return past_len, tail_len, past_units, (tail_len + BLOCK_N - 1) // BLOCK_N


@triton.jit
def split_batch(
    batch_size,
    num_items,
    indptr_ptr,
    last_page_len_ptr,
    tail_lens_ptr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ITEM_UNITS: tl.constexpr,
):
    """Return (units of an item, items of each request [BLOCK_B])."""
    requests = tl.arange(0, BLOCK_B)
    _, _, past_units, tail_units = num_units(
        requests,
        requests < batch_size,
        indptr_ptr,
        last_page_len_ptr,
        tail_lens_ptr,
        PAGE_SIZE=PAGE_SIZE,
        BLOCK_N=BLOCK_N,
    )
    units = past_units + tail_units
    if ITEM_UNITS:
        item_units = tl.full((), ITEM_UNITS, tl.int32)
    else:
        spread = num_items - batch_size
        item_units = tl.maximum((tl.sum(units, axis=0) + spread - 1) // spread, 1)
    return item_units, (units + item_units - 1) // item_units


@triton.jit
def find_item(
    item,
    batch_size,
    num_items,
    indptr_ptr,
    last_page_len_ptr,
    tail_lens_ptr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ITEM_UNITS: tl.constexpr,
):
    """Return (request, first unit, end of units, past_len, tail_len, units of the past) of an item.
    If there is no such item, the request is batch_size and the rest is meaningless."""
    item_units, items = split_batch(
        batch_size,
        num_items,
        indptr_ptr,
        last_page_len_ptr,
        tail_lens_ptr,
        PAGE_SIZE=PAGE_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_B=BLOCK_B,
        ITEM_UNITS=ITEM_UNITS,
    )
    request = tl.sum((tl.cumsum(items, axis=0) <= item).to(tl.int32), axis=0)
    request = tl.minimum(request, batch_size)
    first_item = tl.sum(tl.where(tl.arange(0, BLOCK_B) < request, items, 0), axis=0)
    past_len, tail_len, past_units, tail_units = num_units(
        request,
        request < batch_size,
        indptr_ptr,
        last_page_len_ptr,
        tail_lens_ptr,
        PAGE_SIZE=PAGE_SIZE,
        BLOCK_N=BLOCK_N,
    )
    begin = (item - first_item) * item_units
    end = tl.minimum(begin + item_units, past_units + tail_units)
    return request, begin, end, past_len, tail_len, past_units


@triton.jit
def find_queries(request, qo_indptr_ptr, ROWS: tl.constexpr):
    """Return (first query token, query tokens) of a request. qo_indptr_ptr: None if each has
    ROWS."""
    if qo_indptr_ptr is None:
        return request * ROWS, ROWS
    else:
        begin = tl.load(qo_indptr_ptr + request)
        return begin, tl.load(qo_indptr_ptr + request + 1) - begin
