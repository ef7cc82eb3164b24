"""Triton kernels of weights in two parts: products of a few rows, and the weight in bf16.

A chunk is 256 inputs in 4 planes of 64 contiguous ones. A 16-bit word of the first part holds two
inputs that lie a plane apart, a word of the second part four. With BASE as the exponent, the bits
become bf16 numbers of a row's own scale by 3 to 6 instructions for two weights. The scale, a power
of two, comes in behind the product, so sums are those of the exact weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.int4_products import load_rows, owner_of
from kvspec_kernels.jit.rounding import operand, rounded

# parts.BASE and parts.MIDDLE in both halves of a register.
EXACT_BASE = tl.constexpr(0x38003800)
DRAFT_BASE = tl.constexpr(0x38083808)
# Smallest number of the 16 binades.
LEAST = tl.constexpr(2.0**-15)


@triton.jit
def bits_of(first, second, PLANE: tl.constexpr):
    """Return the bf16 bits, int32, of a plane. first: words of this plane and of another one.
    second: words of all planes."""
    byte = first.to(tl.int32) >> 8 * (PLANE % 2) & 255
    low = second.to(tl.int32) >> 4 * PLANE & 15
    return (byte & 128) << 8 | 0x3800 | (byte & 127) << 4 | low


@triton.jit
def first_of(first, PLANE: tl.constexpr, BASE: tl.constexpr):
    """Return the first part of a plane with BASE, as an operand."""
    if PLANE % 2 == 0:
        return tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 low, high;
            shl.b32 low, $1, 4;
            shl.b32 high, $1, 8;
            lop3.b32 low, low, 0x07F007F0, {BASE}, 0xEA;
            lop3.b32 $0, high, 0x80008000, low, 0xEA;
            }}""",
            "=r,r",
            [first],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 low;
            shr.b32 low, $1, 4;
            lop3.b32 low, low, 0x07F007F0, {BASE}, 0xEA;
            lop3.b32 $0, $1, 0x80008000, low, 0xEA;
            }}""",
            "=r,r",
            [first],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def with_second(value, second, PLANE: tl.constexpr):
    """Return an operand with the second part of a plane put in."""
    SHIFT: tl.constexpr = 4 * PLANE
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 low;
        shr.b32 low, $2, {SHIFT};
        lop3.b32 $0, low, 0x000F000F, $1, 0xEA;
        }}""",
        "=r,r,r",
        [value, second],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def add_plane(
    acc, first, second, x, PLANE: tl.constexpr, BOTH: tl.constexpr, INTERPRET: tl.constexpr
):
    """Add the product of a plane to acc [COLUMNS, ROWS]. first, second: [COLUMNS, 64]. x: [ROWS,
    64]."""
    turned = tl.trans(operand(x, INTERPRET))
    if INTERPRET:
        bits = bits_of(first, second, PLANE)
        if not BOTH:
            bits = bits & -16 | 8
        value = (bits << 16).to(tl.float32, bitcast=True)
    elif BOTH:
        value = with_second(first_of(first, PLANE, EXACT_BASE), second, PLANE)
    else:
        value = first_of(first, PLANE, DRAFT_BASE)
    return tl.dot(value, turned, acc)


@triton.jit
def add_small(total, rows, scale, at, small, mask_rows):
    """Add one listed value of each column, and take away the number in its place. The difference is
    rounded to 2^-24 of that number. rows: pointers [1, ROWS]. scale, at, small: [COLUMNS]."""
    sign = small.to(tl.int32, bitcast=True) & -2147483648
    place = (scale * LEAST).to(tl.int32, bitcast=True) | sign
    difference = small - place.to(tl.float32, bitcast=True)
    mask = (at >= 0)[:, None] & mask_rows[None, :]
    x = tl.load(rows + at[:, None], mask=mask, other=0.0).to(tl.float32)
    return total + x * difference[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_small"])
def product_kernel(
    rows_ptr,
    first_ptr,
    second_ptr,
    scale_ptr,
    small_at_ptr,
    small_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    num_columns,
    depth,
    num_chunks,
    num_small,
    stride_rows,
    WHOLE_DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Multiply rows by columns, with both parts or with the first one alone.

    first: int16 [num_chunks, 2, num_columns, 64]. second: int16 [num_chunks, num_columns, 64].
    Programs share out the chunks of tiles and add partial sums as int4_product_kernel does.
    """
    column_blocks = tl.cdiv(num_columns, COLUMNS)
    items = column_blocks * tl.cdiv(num_rows, ROWS) * num_chunks
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    first_item = (program.to(tl.int64) * items // programs).to(tl.int32)
    end_item = ((program + 1).to(tl.int64) * items // programs).to(tl.int32)
    offs_k = tl.arange(0, 64)
    inside = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    for tile in range(first_item // num_chunks, (end_item - 1) // num_chunks + 1):
        tile_item = tile * num_chunks
        begin = tl.maximum(first_item - tile_item, 0)
        end = tl.minimum(end_item - tile_item, num_chunks)
        offs_m = tile // column_blocks * ROWS + tl.arange(0, ROWS)
        columns = tile % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
        # Columns past the end read others again, and are not stored.
        offs_n = columns % num_columns
        mask_rows = offs_m < num_rows
        rows = rows_ptr + offs_m[:, None].to(tl.int64) * stride_rows
        place = offs_n[:, None] * 64 + offs_k[None, :]
        first_at = first_ptr + begin.to(tl.int64) * num_columns * 128 + place
        second_at = second_ptr + begin.to(tl.int64) * num_columns * 64 + place

        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        for index in range(begin, end):
            first0 = tl.load(first_at, eviction_policy="evict_first")
            first1 = tl.load(first_at + num_columns * 64, eviction_policy="evict_first")
            second = first0
            if BOTH:
                second = tl.load(second_at, eviction_policy="evict_first")
            inputs = index * 256 + offs_k
            x0 = load_rows(rows, mask_rows, inputs, depth, WHOLE_DEPTH)
            x1 = load_rows(rows, mask_rows, inputs + 64, depth, WHOLE_DEPTH)
            x2 = load_rows(rows, mask_rows, inputs + 128, depth, WHOLE_DEPTH)
            x3 = load_rows(rows, mask_rows, inputs + 192, depth, WHOLE_DEPTH)
            first_at += num_columns * 128
            second_at += num_columns * 64
            acc = add_plane(acc, first0, second, x0, 0, BOTH, INTERPRET)
            acc = add_plane(acc, first0, second, x1, 1, BOTH, INTERPRET)
            acc = add_plane(acc, first1, second, x2, 2, BOTH, INTERPRET)
            acc = add_plane(acc, first1, second, x3, 3, BOTH, INTERPRET)

        is_last = program >= 0
        if SHARED:
            first_owner = owner_of(tile_item, items, programs)
            num_others = owner_of(tile_item + num_chunks - 1, items, programs) - first_owner
            if num_others > 0:
                own = 2 * program + (program == first_owner).to(tl.int32)
                tl.store(partial_ptr + own.to(tl.int64) * (COLUMNS * ROWS) + inside, acc)
                # All threads have stored before one of them tells the other programs.
                tl.debug_barrier()
                before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
                is_last = before == num_others
                if is_last:
                    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
                    for other in range(first_owner, first_owner + num_others + 1):
                        part = 2 * other + (other == first_owner).to(tl.int32)
                        # Past the L1 cache, which does not see other programs' stores.
                        acc += tl.load(
                            partial_ptr + part.to(tl.int64) * (COLUMNS * ROWS) + inside,
                            cache_modifier=".cg",
                        )
                    tl.store(arrived_ptr + tile, 0)
        if is_last:
            mask_columns = columns < num_columns
            scale = tl.load(scale_ptr + offs_n)
            total = acc * scale[:, None]
            if BOTH:
                all_rows = rows_ptr + offs_m[None, :].to(tl.int64) * stride_rows
                for each in range(num_small):
                    listed = each * num_columns + offs_n
                    at = tl.load(small_at_ptr + listed)
                    small = tl.load(small_ptr + listed).to(tl.float32)
                    total = add_small(total, all_rows, scale, at, small, mask_rows)
            mask = mask_rows[:, None] & mask_columns[None, :]
            out_at = offs_m[:, None].to(tl.int64) * num_columns + columns[None, :]
            out = rounded(tl.trans(total), tl.bfloat16, INTERPRET)
            tl.store(out_ptr + out_at, out, mask=mask)


@triton.jit
def store_plane(out_at, first, second, scale, mask_columns, inputs, depth, PLANE: tl.constexpr):
    """Store the bf16 bits of a plane. out_at: int16 pointers [COLUMNS, 64] of input 0."""
    value = (bits_of(first, second, PLANE) << 16).to(tl.float32, bitcast=True) * scale[:, None]
    # The product is a bf16 number, so the lower half of its bits is zero.
    bits = (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    place = inputs + PLANE * 64
    mask = mask_columns[:, None] & (place < depth)[None, :]
    tl.store(out_at + place[None, :], bits, mask=mask)


@triton.jit
def reconstruct_kernel(
    first_ptr,
    second_ptr,
    scale_ptr,
    out_ptr,
    num_columns,
    depth,
    COLUMNS: tl.constexpr,
):
    """Store a chunk of some columns as bf16 bits, int16 [num_columns, depth]. Listed values still
    lack."""
    chunk = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask_columns = columns < num_columns
    offs_n = columns % num_columns
    offs_k = tl.arange(0, 64)
    place = offs_n[:, None] * 64 + offs_k[None, :]
    first_at = first_ptr + chunk.to(tl.int64) * num_columns * 128 + place
    first0 = tl.load(first_at)
    first1 = tl.load(first_at + num_columns * 64)
    second = tl.load(second_ptr + chunk.to(tl.int64) * num_columns * 64 + place)
    scale = tl.load(scale_ptr + offs_n)
    out_at = out_ptr + columns[:, None].to(tl.int64) * depth
    inputs = chunk * 256 + offs_k
    store_plane(out_at, first0, second, scale, mask_columns, inputs, depth, 0)
    store_plane(out_at, first0, second, scale, mask_columns, inputs, depth, 1)
    store_plane(out_at, first1, second, scale, mask_columns, inputs, depth, 2)
    store_plane(out_at, first1, second, scale, mask_columns, inputs, depth, 3)


@triton.jit
def store_small_kernel(
    small_at_ptr, small_ptr, out_ptr, num_listed, num_columns, depth, BLOCK: tl.constexpr
):
    """Store listed values, bf16 bits, in their places of out, int16 [num_columns, depth]."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_listed
    at = tl.load(small_at_ptr + offs, mask=mask, other=-1)
    small = tl.load(small_ptr + offs, mask=mask, other=0)
    column = (offs % num_columns).to(tl.int64)
    tl.store(out_ptr + column * depth + at, small, mask=at >= 0)
