"""Pages in registers, cut so that every thread holds whole words of codes.

A *pair* is two neighbouring channels: an int32 of two 16-bit values or an int64 of two fp32 values.
Tensors of pairs are [columns, rows, chunks], because Triton gives neighbouring threads to the first
dimension where it sees nothing contiguous. A position of such a tensor stands for the 8 elements of
one word (K) or the 16 elements of two words (V). The pairs of a position are in separate tensors.
With the numbers of formats.py, a tile of K has tokens 16 r + 8 b + g and channels
16 c + 8 d + 2 t + e. A tile of V has channels 16 a + 8 b + 2 u + h and tokens 16 c + 8 d + 2 t + e.
Then:

    K: row = (r, g), column = (c, t); pairs[b, d], halves e; code 4 d + 2 b + e of a word
    V: row = (c, t), column = (a, u); pairs[d, e, b], halves h; code 4 d + 2 b + e of word h

Sizes that are no powers of two are padded. Padded positions repeat the last valid position, which
does not change minima and maxima, so that only stores need masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import arithmetic
from kvspec_kernels.jit.sizes import next_power_of_2


@triton.jit
def positions(NUM_CHUNKS: tl.constexpr, NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr):
    """Return indices chunk, row and column, and masks that are false for padding: of positions, of
    chunks and columns, of chunks and rows. All are [columns, rows, chunks] up to broadcasting."""
    col = tl.arange(0, next_power_of_2(NUM_COLS))[:, None, None]
    row = tl.arange(0, next_power_of_2(NUM_ROWS))[None, :, None]
    chunk = tl.arange(0, next_power_of_2(NUM_CHUNKS))[None, None, :]
    mask_chunk = (chunk < NUM_CHUNKS) & (col < NUM_COLS)
    mask_row = (chunk < NUM_CHUNKS) & (row < NUM_ROWS)
    mask = mask_chunk & mask_row
    # Take minima only if needed: they hide from the compiler that columns are contiguous.
    if chunk.numel != NUM_CHUNKS:
        chunk = tl.minimum(chunk, NUM_CHUNKS - 1)
    if row.numel != NUM_ROWS:
        row = tl.minimum(row, NUM_ROWS - 1)
    if col.numel != NUM_COLS:
        col = tl.minimum(col, NUM_COLS - 1)
    return chunk, row, col, mask, mask_chunk, mask_row


@triton.jit
def half_of(pairs, HALF: tl.constexpr, KV_DTYPE: tl.constexpr):
    """Return the first (HALF 0) or second channel of pairs, as fp32."""
    if KV_DTYPE == "fp32":
        return (pairs >> (32 * HALF)).to(tl.int32).to(tl.float32, bitcast=True)
    elif KV_DTYPE == "fp16":
        return (pairs >> (16 * HALF)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif HALF == 0:
        return (pairs << 16).to(tl.float32, bitcast=True)
    else:
        return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def load_k(page_ptr, token, pair, stride_token: tl.constexpr, KV_DTYPE: tl.constexpr):
    """Load K in fp32, one tensor for each of codes 0 to 7 of a word. token, pair: those of
    b = d = e = 0."""
    ptr = page_ptr + (token * stride_token + pair)
    p00 = tl.load(ptr)
    p01 = tl.load(ptr + 4)
    p10 = tl.load(ptr + 8 * stride_token)
    p11 = tl.load(ptr + (8 * stride_token + 4))
    return (
        half_of(p00, 0, KV_DTYPE),
        half_of(p00, 1, KV_DTYPE),
        half_of(p10, 0, KV_DTYPE),
        half_of(p10, 1, KV_DTYPE),
        half_of(p01, 0, KV_DTYPE),
        half_of(p01, 1, KV_DTYPE),
        half_of(p11, 0, KV_DTYPE),
        half_of(p11, 1, KV_DTYPE),
    )


@triton.jit
def load_v(page_ptr, token, pair, stride_token: tl.constexpr, KV_DTYPE: tl.constexpr):
    """Load V in fp32: codes 0 to 7 of the word of h = 0, then of h = 1. token, pair: see load_k."""
    ptr = page_ptr + (token * stride_token + pair)
    p0 = tl.load(ptr)
    p1 = tl.load(ptr + stride_token)
    p2 = tl.load(ptr + 4)
    p3 = tl.load(ptr + (stride_token + 4))
    p4 = tl.load(ptr + 8 * stride_token)
    p5 = tl.load(ptr + 9 * stride_token)
    p6 = tl.load(ptr + (8 * stride_token + 4))
    p7 = tl.load(ptr + (9 * stride_token + 4))
    return (
        (
            half_of(p0, 0, KV_DTYPE),
            half_of(p1, 0, KV_DTYPE),
            half_of(p2, 0, KV_DTYPE),
            half_of(p3, 0, KV_DTYPE),
            half_of(p4, 0, KV_DTYPE),
            half_of(p5, 0, KV_DTYPE),
            half_of(p6, 0, KV_DTYPE),
            half_of(p7, 0, KV_DTYPE),
        ),
        (
            half_of(p0, 1, KV_DTYPE),
            half_of(p1, 1, KV_DTYPE),
            half_of(p2, 1, KV_DTYPE),
            half_of(p3, 1, KV_DTYPE),
            half_of(p4, 1, KV_DTYPE),
            half_of(p5, 1, KV_DTYPE),
            half_of(p6, 1, KV_DTYPE),
            half_of(p7, 1, KV_DTYPE),
        ),
    )


@triton.jit
def least(a, b, c, d):
    return tl.minimum(tl.minimum(a, b), tl.minimum(c, d))


@triton.jit
def most(a, b, c, d):
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def ranges(low, high, AXIS: tl.constexpr):
    """Return the minima of four tensors and the maxima of four along AXIS, which keeps size 1. One
    reduction serves all eight, because each costs a trip through shared memory."""
    n0, n1 = arithmetic.negative(high[0]), arithmetic.negative(high[1])
    n2, n3 = arithmetic.negative(high[2]), arithmetic.negative(high[3])
    lows = tl.join(tl.join(low[0], low[2]), tl.join(low[1], low[3]))
    highs = tl.join(tl.join(n0, n2), tl.join(n1, n3))
    lowest, highest = tl.split(tl.min(tl.join(lows, highs), axis=AXIS, keep_dims=True))
    low02, low13 = tl.split(lowest)
    high02, high13 = tl.split(highest)
    low0, low2 = tl.split(low02)
    low1, low3 = tl.split(low13)
    n0, n2 = tl.split(high02)
    n1, n3 = tl.split(high13)
    high0, high1 = arithmetic.negative(n0), arithmetic.negative(n1)
    high2, high3 = arithmetic.negative(n2), arithmetic.negative(n3)
    return (low0, low1, low2, low3), (high0, high1, high2, high3)


@triton.jit
def copy_page(
    page_ptr,
    record_ptr,
    stride_token: tl.constexpr,
    TOKEN_PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Copy the raw bits of a page part [tokens, channels] into a record, row-major."""
    for start in tl.static_range(0, PAGE_SIZE, 32):
        index = tl.arange(0, 32 * next_power_of_2(TOKEN_PAIRS))
        mask = index < 32 * TOKEN_PAIRS
        token = start + index // TOKEN_PAIRS
        pairs = tl.load(page_ptr + token * stride_token + index % TOKEN_PAIRS, mask, other=0)
        tl.store(record_ptr + start * TOKEN_PAIRS + index, pairs, mask)
