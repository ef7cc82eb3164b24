"""Find pages of a request, and load BLOCK_N tokens of a page of one KV head as matrix operands: K
transposed [BLOCK_D, BLOCK_N] and V [BLOCK_N, BLOCK_D], in DTYPE, zero outside of the masks."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.rounding import rounded


@triton.jit
def find_page_list(indices_ptr, begin, head, stride_index, LISTS_BY_HEAD: tl.constexpr):
    """Return the pointer to the first page of a request's list, which begins at index `begin`."""
    if LISTS_BY_HEAD:
        return indices_ptr + begin.to(tl.int64) * stride_index + head
    else:
        return indices_ptr + begin


@triton.jit
def find_page(
    page_list_ptr,
    token,
    past_len,
    stride_index,
    LISTS_BY_HEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Return (page that has a token of the past, tokens seen from that token on). For no page, any
    page of which no token is seen."""
    num_seen = past_len - token
    if LISTS_BY_HEAD:
        page = tl.load(page_list_ptr + token // PAGE_SIZE * stride_index).to(tl.int64)
        return tl.maximum(page, 0), tl.where(page >= 0, num_seen, 0)
    else:
        return tl.load(page_list_ptr + token // PAGE_SIZE).to(tl.int64), num_seen


@triton.jit
def load_rows(
    k_ptr,
    v_ptr,
    offs_token,
    mask_token,
    offs_d,
    stride_k_token,
    stride_v_token,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Load tokens in full precision, one row each."""
    mask_d = offs_d < HEAD_DIM
    k = tl.load(
        k_ptr + offs_token[None, :] * stride_k_token + offs_d[:, None],
        mask=mask_token[None, :] & mask_d[:, None],
        other=0.0,
    )
    v = tl.load(
        v_ptr + offs_token[:, None] * stride_v_token + offs_d[None, :],
        mask=mask_token[:, None] & mask_d[None, :],
        other=0.0,
    )
    k = rounded(k.to(tl.float32), DTYPE, INTERPRET)
    return k, rounded(v.to(tl.float32), DTYPE, INTERPRET)


@triton.jit
def load_exact(
    residual_ptr,
    offs_token,
    mask_token,
    offs_d,
    HEAD_DIM: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Load tokens of a residual record of the exact target."""
    return load_rows(
        (residual_ptr + K_BITS).to(tl.pointer_type(DTYPE)),
        (residual_ptr + V_BITS).to(tl.pointer_type(DTYPE)),
        offs_token,
        mask_token,
        offs_d,
        HEAD_DIM,
        HEAD_DIM,
        HEAD_DIM=HEAD_DIM,
        DTYPE=DTYPE,
        INTERPRET=INTERPRET,
    )


@triton.jit
def load_keys(
    anchor_ptr,
    table_ptr,
    first,
    offs_d,
    DECODE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_CODES: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    FINITE_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load K of tokens first .. first + BLOCK_N - 1 of an anchor record. DECODE: as in
    load_encoded()."""
    offs_token = first + tl.arange(0, BLOCK_N)
    mask_d = offs_d < HEAD_DIM
    chunk = first // K_CHUNK
    # A block that spans several chunks needs the chunk of each token.
    if K_CHUNK % BLOCK_N != 0:
        chunk = offs_token[None, :] // K_CHUNK
    k = DECODE(
        anchor_ptr,
        anchor_ptr,
        table_ptr,
        offs_token[None, :],
        offs_d[:, None],
        chunk,
        mask_d[:, None],
        PART=0,
        ANCHOR_BITS=ANCHOR_BITS,
        REFINED=False,
        PAGE_SIZE=PAGE_SIZE,
        HEAD_DIM=HEAD_DIM,
        CODES=K_CODES,
        OFFSET=K_OFFSET,
        SCALE=K_SCALE,
        CORRECTIONS=0,
    )
    k = tl.minimum(tl.maximum(k, -FINITE_MAX), FINITE_MAX)
    return rounded(k, DTYPE, INTERPRET)


@triton.jit
def load_encoded(
    anchor_ptr,
    residual_ptr,
    table_ptr,
    first,
    mask_token,
    offs_d,
    DECODE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    REFINED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K_CHUNK: tl.constexpr,
    V_CHUNK: tl.constexpr,
    K_CODES: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_CORRECTIONS: tl.constexpr,
    V_CORRECTIONS: tl.constexpr,
    DTYPE: tl.constexpr,
    FINITE_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load tokens first .. first + BLOCK_N - 1 of an anchor record, with corrections if REFINED.

    DECODE: the codec's function, with the arguments and results of `decode_log4`.
    """
    offs_token = first + tl.arange(0, BLOCK_N)
    mask_d = offs_d < HEAD_DIM
    k_chunk = first // K_CHUNK
    v_chunk = first // V_CHUNK
    # A block that spans several chunks needs the chunk of each token.
    if K_CHUNK % BLOCK_N != 0:
        k_chunk = offs_token[None, :] // K_CHUNK
    if V_CHUNK % BLOCK_N != 0:
        v_chunk = offs_token[:, None] // V_CHUNK
    k = DECODE(
        anchor_ptr,
        residual_ptr,
        table_ptr,
        offs_token[None, :],
        offs_d[:, None],
        k_chunk,
        mask_d[:, None],
        PART=0,
        ANCHOR_BITS=ANCHOR_BITS,
        REFINED=REFINED,
        PAGE_SIZE=PAGE_SIZE,
        HEAD_DIM=HEAD_DIM,
        CODES=K_CODES,
        OFFSET=K_OFFSET,
        SCALE=K_SCALE,
        CORRECTIONS=K_CORRECTIONS,
    )
    v = DECODE(
        anchor_ptr,
        residual_ptr,
        table_ptr,
        offs_token[:, None],
        offs_d[None, :],
        v_chunk,
        mask_d[None, :],
        PART=1,
        ANCHOR_BITS=ANCHOR_BITS,
        REFINED=REFINED,
        PAGE_SIZE=PAGE_SIZE,
        HEAD_DIM=HEAD_DIM,
        CODES=V_CODES,
        OFFSET=V_OFFSET,
        SCALE=V_SCALE,
        CORRECTIONS=V_CORRECTIONS,
    )
    # Metadata of tokens that were never written may be NaN, and a weight of 0 times NaN is NaN.
    v = tl.where(mask_token[:, None], v, 0.0)
    # Clamp values that would round to infinity in DTYPE, as the reference decoders do.
    k = tl.minimum(tl.maximum(k, -FINITE_MAX), FINITE_MAX)
    v = tl.minimum(tl.maximum(v, -FINITE_MAX), FINITE_MAX)
    return rounded(k, DTYPE, INTERPRET), rounded(v, DTYPE, INTERPRET)
