"""Deterministic attention at full precision: bits do not depend on batching, chunking or drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from kvspec_kernels.jit.chunks import chunk_blocks
from kvspec_kernels.jit.deterministic_attention import (
    deterministic_attention_kernel,
    merge_chunks_kernel,
)
from kvspec_kernels.ops.attention import Tail
from kvspec_kernels.ops.device import LARGE_BYTES, SMALL_BYTES, is_large
from kvspec_kernels.ops.triton_attention import INTERPRETED, TRITON_DTYPES

# A fixed size: another tile could compile to instructions that add in another order.
BLOCK_ROWS = 64
# Most bytes that the compiler adds to tiles: barriers of its pipeline.
BARRIER_BYTES = 64


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel is compiled for a GPU, sizes and dtype; all queries of a server take the same,
    so that sums have one order."""

    num_warps: int
    num_stages: int


def shared_bytes(
    page_size: int, head_dim: int, dtype: torch.dtype, *, is_large: bool
) -> dict[Launch, int]:
    """Return the possible launches of a GPU, the fastest first, and the bytes of shared memory that
    a block of each takes at most."""
    block_dim = max(16, triton.next_power_of_2(head_dim))
    queries, page = BLOCK_ROWS * block_dim, page_size * block_dim
    if is_large:
        # The pipeline holds two pages of K and two of V. Probabilities stay in registers.
        values = {Launch(4, 3): queries + 4 * page}
    else:
        # Larger tiles need the registers of 8 warps. Without a pipeline, K and V of a page lie in
        # the same place.
        warps = 4 if page < 64 * 128 and block_dim < 128 else 8
        probabilities = BLOCK_ROWS * page_size
        values = {
            Launch(warps, 3): queries + 2 * page + probabilities,
            Launch(warps, 1): queries + page + probabilities,
        }
    return {launch: count * dtype.itemsize + BARRIER_BYTES for launch, count in values.items()}


def launch_of(page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Return the launch for these sizes. Raises ValueError if a block would need more shared memory
    than the GPU has."""
    large = is_large(device)
    limit = LARGE_BYTES if large else SMALL_BYTES
    for launch, nbytes in shared_bytes(page_size, head_dim, dtype, is_large=large).items():
        if nbytes <= limit:
            return launch
    raise ValueError(
        f"pages of {page_size} tokens with heads of {head_dim} in {dtype} do not fit the "
        f"{limit // 1024} KiB of shared memory of this GPU: take smaller pages"
    )


class Past(NamedTuple):
    """Full pages that every query of a request sees, in one pool.

    k, v: [S, H, P, D] of the queries' dtype, equal strides, the last dimension contiguous.
    slots: [num_pages] int32; page p is at slots[p] of k and v.
    indptr: [batch_size + 1] int32; request b has pages indices[indptr[b] : indptr[b + 1]], int32.
    """

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor


def num_chunks(num_pages: int, page_size: int) -> int:
    """Return the number of chunks of a request with num_pages pages, past and tail together."""
    return -(-num_pages // chunk_blocks(page_size))


def deterministic_attention(
    q: torch.Tensor,
    past: Past,
    tail: Tail,
    qo_indptr: torch.Tensor,
    max_qo_len: int,
    out: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from q [num_tokens, num_qo_heads, D] to the past and, causally, to the tail, with
    softmax scale 1 / sqrt(D). Returns `out`, or a new contiguous tensor like q. Rows that see no
    token are 0.

    qo_indptr: [batch_size + 1] int32; request b's queries are its newest tokens, qo_indptr[b] ..
        qo_indptr[b + 1], at most max_qo_len. tail: as in VerifyAttention, pages after the past.
    parts: [num_tokens, most num_chunks() of a request, num_qo_heads, D + 2] fp32 scratch memory, or
        more tokens. With it, programs share the chunks of a request, which is faster for few
        queries. Without it, a program has all of them.
    The bits of a row depend only on its query and on the K and V that it sees. One instruction
    sequence adds the pages of a chunk in order, whether past or tail, and chunks are merged in
    order. Decoding one token at a time, several at once or a prompt in chunks gives equal bits, if
    the rest of the model is batch-invariant too.
    Does not wait for the device, and allocates only `out`. Raises ValueError for tensors that do
    not fit, for page sizes that are not powers of two, and as launch_of(); indices are not checked.
    """
    num_tokens, num_qo_heads, head_dim = q.shape
    page_size, num_kv_heads = tail.window_k.shape[1:3]
    _check(q, past, tail, qo_indptr)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    group, batch = num_qo_heads // num_kv_heads, len(qo_indptr) - 1
    launch = launch_of(page_size, head_dim, q.dtype, q.device)
    max_chunks = 1
    if parts is not None:
        _check_parts(parts, q)
        max_chunks = parts.shape[1]
    common = {
        "out_ptr": out,
        "parts_ptr": out if parts is None else parts,
        "qo_indptr_ptr": qo_indptr,
        "past_indptr_ptr": past.indptr,
        "tail_lens_ptr": tail.lens,
        "max_chunks": max_chunks,
        "stride_out_token": out.stride(0),
        "stride_out_head": out.stride(1),
        "CHUNK_PAGES": chunk_blocks(page_size),
        "GROUP": group,
        "PAGE_SIZE": page_size,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(head_dim)),
        "NUM_QO_HEADS": num_qo_heads,
        "DTYPE": TRITON_DTYPES[q.dtype],
        "INTERPRET": INTERPRETED,
    }
    row_blocks = triton.cdiv(max_qo_len * group, BLOCK_ROWS)
    deterministic_attention_kernel[(row_blocks, batch * max_chunks, num_kv_heads)](
        q_ptr=q,
        past_slots_ptr=past.slots,
        tail_indptr_ptr=tail.indptr,
        tail_slots_ptr=tail.indices,
        past_pages_ptr=past.indices,
        past_k_ptr=past.k,
        past_v_ptr=past.v,
        tail_k_ptr=tail.window_k,
        tail_v_ptr=tail.window_v,
        scale=math.log2(math.e) / math.sqrt(head_dim),
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_past_slot=past.k.stride(0),
        stride_past_head=past.k.stride(1),
        stride_past_token=past.k.stride(2),
        stride_tail_slot=tail.window_k.stride(0),
        stride_tail_head=tail.window_k.stride(2),
        stride_tail_token=tail.window_k.stride(1),
        SPLIT=parts is not None,
        BLOCK_ROWS=BLOCK_ROWS,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **common,
    )
    if parts is not None:
        merge_chunks_kernel[(max_qo_len, batch, num_kv_heads)](
            BLOCK_ROWS=triton.next_power_of_2(group), num_warps=1, **common
        )
    return out


def _check_parts(parts: torch.Tensor, q: torch.Tensor) -> None:
    num_tokens, num_qo_heads, head_dim = q.shape
    if parts.ndim != 4 or parts.shape[2:] != (num_qo_heads, head_dim + 2):
        raise ValueError(
            f"parts must be [tokens, chunks, {num_qo_heads}, {head_dim + 2}], "
            f"got {list(parts.shape)}"
        )
    if len(parts) < num_tokens:
        raise ValueError(f"parts must have room for {num_tokens} tokens, got {len(parts)}")
    if parts.dtype != torch.float32 or parts.device != q.device or not parts.is_contiguous():
        raise ValueError(
            f"parts must be contiguous fp32 on {q.device}, got {parts.dtype} on {parts.device}"
        )


def _check(q: torch.Tensor, past: Past, tail: Tail, qo_indptr: torch.Tensor) -> None:
    page_size, num_kv_heads, head_dim = tail.window_k.shape[1:]
    if page_size & (page_size - 1) or page_size < 16:
        raise ValueError(f"the page size must be a power of two of at least 16, got {page_size}")
    if q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q {list(q.shape)} does not fit {num_kv_heads} KV heads of size {head_dim}"
        )
    if past.k.shape[1:] != (num_kv_heads, page_size, head_dim):
        raise ValueError(
            f"past pages must be [S, {num_kv_heads}, {page_size}, {head_dim}], "
            f"got {list(past.k.shape)}"
        )
    for name, k, v in (("past", past.k, past.v), ("tail", tail.window_k, tail.window_v)):
        if k.dtype != q.dtype or v.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype}, got {k.dtype} and {v.dtype}")
        if k.shape != v.shape or k.stride() != v.stride() or k.stride(-1) != 1:
            raise ValueError(
                f"k and v of {name} must have equal shapes and strides, and contiguous channels"
            )
        if any(x.data_ptr() % 16 or any(n % 16 for n in x.stride()[:-1]) for x in (k, v)):
            raise ValueError(
                f"k and v of {name} must start at multiples of 16 bytes and have strides of "
                f"multiples of 16 elements, got strides {k.stride()}"
            )
    if q.stride(-1) != 1:
        raise ValueError("q must have contiguous channels")
    batch = len(qo_indptr) - 1
    if not len(past.indptr) - 1 == len(tail.indptr) - 1 == len(tail.lens) == batch:
        raise ValueError(
            f"qo_indptr has {batch} requests, but past.indptr {len(past.indptr) - 1}, "
            f"tail.indptr {len(tail.indptr) - 1} and tail.lens {len(tail.lens)}"
        )
    indices = {
        "qo_indptr": qo_indptr,
        **{f"past.{name}": getattr(past, name) for name in ("slots", "indptr", "indices")},
        **{f"tail.{name}": getattr(tail, name) for name in ("indptr", "indices", "lens")},
    }
    for name, values in indices.items():
        if values.dtype != torch.int32 or values.device != q.device:
            raise ValueError(
                f"{name} must be int32 on {q.device}, got {values.dtype} on {values.device}"
            )
