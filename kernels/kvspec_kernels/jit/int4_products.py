"""Triton kernel of products of a few rows with weights in 4 bits.

A chunk is 4 groups of 64 inputs. A 16-bit word holds the codes of 4 inputs, one of each group: bits
4p to 4p + 3 belong to group p. So each plane of 4 bits is one group, with contiguous inputs and
with one scale s and zero z a column.

The bits 0x4300 | u are 128 + u in bf16, exactly, so a word becomes an operand in 2 instructions for
2 codes. There are two ways to go on:

Scaled sums: the scale and the zero come in behind the product of a group,

    sum x (u s + z) = s sum x (128 + u) + (z - 128 s) sum x.

A product with ones adds up x: its result has the layout of the other one, so no thread asks
another. The two terms cancel, which fp32 can afford: tests/unit/kernels/test_int4_products.py
derives the bound.

DECODED: weights become u s + z, rounded to bf16, by 2 more instructions for 2 codes. Half as many
products, and none of them waits for a sum. The reference rounds bf16 weights alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.rounding import operand, rounded


@triton.jit
def plane_of(words, PLANE: tl.constexpr, INTERPRET: tl.constexpr):
    """Return 128 + u of the codes u in a plane of words, as an operand."""
    if INTERPRET:
        return (words >> 4 * PLANE & 15).to(tl.float32) + 128.0
    else:
        SHIFT: tl.constexpr = 4 * PLANE
        # 0xEA: (a & b) | c.
        return tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 codes;
            shr.b32 codes, $1, {SHIFT};
            lop3.b32 $0, codes, 0x000F000F, 0x43004300, 0xEA;
            }}""",
            "=r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def decoded_plane_of(words, affine, PLANE: tl.constexpr, INTERPRET: tl.constexpr):
    """Return u s + z of the codes u in a plane of words, rounded to bf16, as an operand."""
    raw = plane_of(words, PLANE, INTERPRET)
    if INTERPRET:
        scale, zero = scale_and_zero(affine)
        return rounded((raw - 128.0) * scale + zero, tl.bfloat16, INTERPRET)
    else:
        scale = affine.to(tl.int16).to(tl.bfloat16, bitcast=True)
        zero = (affine >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        # raw - 128 is exact: the first line multiplies by 1 and adds -128.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 codes, one, offset;
            mov.b32 one, 0x3F803F80;
            mov.b32 offset, 0xC300C300;
            fma.rn.bf16x2 codes, $1, one, offset;
            fma.rn.bf16x2 $0, codes, $2, $3;
            }""",
            "=r,r,r,r",
            [raw, scale[:, None], zero[:, None]],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def scale_and_zero(affine):
    """Return fp32 [COLUMNS, 1] scales and zeros. affine: 32-bit words, the bf16 scale in the low
    half and the bf16 zero in the high half."""
    scale = (affine << 16).to(tl.float32, bitcast=True)
    zero = (affine & -65536).to(tl.float32, bitcast=True)
    return scale[:, None], zero[:, None]


@triton.jit
def ones_like(words, INTERPRET: tl.constexpr):
    """Return ones for all words, as an operand. The assembly keeps them in registers, where a
    constant would go through shared memory."""
    if INTERPRET:
        return words.to(tl.float32) * 0.0 + 1.0
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 unused; mov.b32 unused, $1; mov.b32 $0, 0x3F803F80; }",
            "=r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def add_group(
    acc, words, x, affine, PLANE: tl.constexpr, DECODED: tl.constexpr, INTERPRET: tl.constexpr
):
    """Add the product of group PLANE of a chunk to acc [COLUMNS, ROWS]. words: [COLUMNS, 64]. x:
    [ROWS, 64]. affine: as in scale_and_zero()."""
    turned = tl.trans(operand(x, INTERPRET))
    if DECODED:
        return tl.dot(decoded_plane_of(words, affine, PLANE, INTERPRET), turned, acc)
    else:
        raw = tl.dot(plane_of(words, PLANE, INTERPRET), turned)
        total = tl.dot(ones_like(words, INTERPRET), turned)
        scale, zero = scale_and_zero(affine)
        return acc + scale * raw + (zero - 128.0 * scale) * total


@triton.jit
def load_rows(rows_ptr, mask_rows, offs_k, depth, WHOLE_DEPTH: tl.constexpr):
    """Load 64 inputs of the rows."""
    mask = mask_rows[:, None] & (offs_k >= 0)[None, :]
    if not WHOLE_DEPTH:
        mask = mask & (offs_k < depth)[None, :]
    return tl.load(rows_ptr + offs_k[None, :], mask=mask, other=0.0)


@triton.jit
def load_affine(affine_at, mask, num_columns):
    """Load scales and zeros of the 4 groups of a chunk."""
    return (
        tl.load(affine_at, mask=mask, other=0),
        tl.load(affine_at + num_columns, mask=mask, other=0),
        tl.load(affine_at + 2 * num_columns, mask=mask, other=0),
        tl.load(affine_at + 3 * num_columns, mask=mask, other=0),
    )


@triton.jit
def owner_of(item, items, programs):
    """Return the program whose share of the items has this item."""
    return (((item + 1).to(tl.int64) * programs - 1) // items).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def int4_product_kernel(
    rows_ptr,
    words_ptr,
    affine_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    num_columns,
    depth,
    num_chunks,
    stride_rows,
    HAS_BIAS: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
    DECODED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Multiply rows by columns. Programs share out the chunks of all tiles, one tile after the
    other, so each has as many (Stream-K, Osama et al. 2023).

    words: int16 [num_chunks, num_columns, 64]. affine: int32 [4 num_chunks, num_columns]. Without
    SHARED every program has whole tiles. Otherwise a tile may have several programs, which leave
    partial sums, fp32 [2 * programs, COLUMNS, ROWS]: a program of a tile that begins with it in its
    odd place, and of one that began before in its even place. The program that arrives last at a
    tile adds them in order, so the result does not depend on which one that is. It leaves the
    tile's count of arrivals, int32, at zero again.
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
        chunk = words_ptr + begin.to(tl.int64) * num_columns * 64
        words_at = chunk + offs_n[:, None] * 64 + offs_k[None, :]
        affine_at = affine_ptr + begin.to(tl.int64) * 4 * num_columns + offs_n

        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        if not DECODED:
            # The pipeline covers operands of products only, so sums are scaled by what was read a
            # chunk ahead.
            exists = (columns >= 0) & (begin < end)
            affine0, affine1, affine2, affine3 = load_affine(affine_at, exists, num_columns)
        for index in range(begin, end):
            words = tl.load(words_at, eviction_policy="evict_first")
            inputs = index * 256 + offs_k
            x0 = load_rows(rows, mask_rows, inputs, depth, WHOLE_DEPTH)
            x1 = load_rows(rows, mask_rows, inputs + 64, depth, WHOLE_DEPTH)
            x2 = load_rows(rows, mask_rows, inputs + 128, depth, WHOLE_DEPTH)
            x3 = load_rows(rows, mask_rows, inputs + 192, depth, WHOLE_DEPTH)
            if DECODED:
                affine0, affine1, affine2, affine3 = load_affine(
                    affine_at, columns >= 0, num_columns
                )
            words_at += num_columns * 64
            affine_at += 4 * num_columns
            if not DECODED:
                more = (columns >= 0) & (index + 1 < end)
                next0, next1, next2, next3 = load_affine(affine_at, more, num_columns)
            acc = add_group(acc, words, x0, affine0, 0, DECODED, INTERPRET)
            acc = add_group(acc, words, x1, affine1, 1, DECODED, INTERPRET)
            acc = add_group(acc, words, x2, affine2, 2, DECODED, INTERPRET)
            acc = add_group(acc, words, x3, affine3, 3, DECODED, INTERPRET)
            if not DECODED:
                affine0, affine1, affine2, affine3 = next0, next1, next2, next3

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
            mask = mask_rows[:, None] & mask_columns[None, :]
            place = offs_m[:, None].to(tl.int64) * num_columns + columns[None, :]
            if HAS_BIAS:
                bias = tl.load(bias_ptr + columns, mask=mask_columns, other=0.0).to(tl.float32)
            else:
                bias = tl.zeros((COLUMNS,), tl.float32)
            out = tl.trans(acc) + bias[None, :]
            tl.store(out_ptr + place, rounded(out, DTYPE, INTERPRET), mask=mask)
