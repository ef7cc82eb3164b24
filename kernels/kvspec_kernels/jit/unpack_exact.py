"""Triton kernel that unpacks packed residual records of the target exact (`packed_format.py`).

A lane reads the codes of four values at a time from three words of the body. Values then go through
shared memory into the order of a page, so that stores fill whole sectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels import packed_format
from kvspec_kernels.codecs import packed_sizes
from kvspec_kernels.jit import packed_rules

HEADER_WORDS = tl.constexpr(packed_sizes.HEADER_BYTES // 4)
RAW_WORDS = tl.constexpr(packed_format.RAW_OFFSET // 4)


@triton.jit
def _rules(
    anchor_ptr,
    segment,
    run,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES: tl.constexpr,
    K_GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the widths of a run's values, what `bits_of` takes of them, and the sum of widths."""
    widths, bases = (), ()
    size = tl.zeros_like(run)
    lane = run // (TILES // 2)
    words_ptr = anchor_ptr + (FIELDS[0] + segment * (32 * TILES) + run * 2)
    for i in tl.static_range(2):
        row, column = packed_rules.locate_tile(segment, run, i, PART, PAGE_SIZE, HEAD_DIM, TILES)
        word = tl.load(words_ptr + i)
        prepared = packed_rules.prepare_tile(
            anchor_ptr, row, column, lane, PART, FIELDS, PAGE_SIZE, HEAD_DIM, K_GROUP, DTYPE
        )
        for c in tl.static_range(8):
            p = prepared[c // 4 * 2 + c % 2]
            width, near, order = packed_rules.value_rule(
                word, c // 2 * 4 + c % 2 * 16, p, DTYPE, MANTISSA_BITS, INTERPRET
            )
            widths += (width,)
            bases += (tl.where(near, p[3], order - ((1 << width - 1) - 1)),)
            size += width
    return widths, bases, size


@triton.jit
def _load_codes(
    body_ptr,
    widths,
    bases,
    begin,
    MANTISSA_BITS: tl.constexpr,
    BODY_WORDS: tl.constexpr,
):
    """Return the values of a run whose codes begin at bit `begin` of the body, flags of those that
    escaped, whose values mean nothing, and their number. body_ptr: uint32."""
    values = ()
    escapes, count = tl.zeros_like(begin), tl.zeros_like(begin)
    at = begin
    for j in tl.static_range(0, 16, 4):
        # Four codes have up to 56 bits. Starts of a damaged record may point anywhere.
        word, shift = at >> 5, (at & 31).to(tl.int64)
        low = tl.load(body_ptr + word, mask=word < BODY_WORDS, other=0).to(tl.int64)
        middle = tl.load(body_ptr + (word + 1), mask=word < BODY_WORDS - 1, other=0).to(tl.int64)
        high = tl.load(body_ptr + (word + 2), mask=word < BODY_WORDS - 2, other=0).to(tl.int64)
        first = ((low | middle << 32) >> shift).to(tl.uint32)
        second = ((middle | high << 32) >> shift).to(tl.uint32)
        both = first.to(tl.int64) | second.to(tl.int64) << 32
        third = (both >> (widths[j] + widths[j + 1]).to(tl.int64)).to(tl.uint32)
        for i in tl.static_range(4):
            width = widths[j + i]
            window = first if i < 2 else third
            if i % 2 == 1:
                window = window >> widths[j + i - 1].to(tl.uint32)
            all_ones = (1 << width) - 1
            code = window.to(tl.int32, bitcast=True) & all_ones
            escaped = (code == all_ones).to(tl.int32)
            escapes |= escaped << j + i
            count += escaped
            values += (packed_rules.bits_of(code, width, bases[j + i], MANTISSA_BITS),)
            at += width
    return values, escapes, count


@triton.jit
def _load_escapes(body_ptr, values, escapes, place, BODY_WORDS: tl.constexpr):
    """Return values with those that escaped, whose bits begin at the 16-bit number `place`."""
    halves_ptr = body_ptr.to(tl.pointer_type(tl.int16))
    results = ()
    for j in tl.static_range(16):
        escaped = escapes >> j & 1
        mask = (escaped != 0) & (place < 2 * BODY_WORDS)
        bits = tl.load(halves_ptr + place, mask=mask, other=0).to(tl.int32)
        results += (tl.where(escaped != 0, bits, values[j]),)
        place += escaped
    return results


@triton.jit
def _in_rows(values, PART: tl.constexpr, TILES: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return values as rows of tiles, [segments * TILES * 16, ...]: of K, tokens of 8 pairs of
    channels, int32; of V, tokens of 16 channels, int16."""
    words = ()
    for i in tl.static_range(2):
        x = values[8 * i : 8 * i + 8]
        if PART == 0:
            p0, p1 = x[0] & 0xFFFF | x[1] << 16, x[2] & 0xFFFF | x[3] << 16
            p2, p3 = x[4] & 0xFFFF | x[5] << 16, x[6] & 0xFFFF | x[7] << 16
            words += (tl.join(tl.join(p0, p2), tl.join(p1, p3)),)
        else:
            even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
            odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
            words += (tl.join(even, odd).to(tl.int16),)
    both = tl.join(words[0], words[1])
    if PART == 0:
        # [segment, g, t, pair of tiles, d, r, tile]
        split = both.reshape(SEGMENTS, 8, 4, TILES // 2, 2, 2, 2)
        return split.permute(0, 3, 6, 5, 1, 4, 2).reshape(SEGMENTS * TILES * 16, 8)
    else:
        # [segment, g, t, pair of tiles, d, r, e, tile]
        split = both.reshape(SEGMENTS, 8, 4, TILES // 2, 2, 2, 2, 2)
        return split.permute(0, 3, 7, 4, 2, 6, 5, 1).reshape(SEGMENTS * TILES * 16, 16)


@triton.jit
def _locate(row, sizes, NUM_SEGMENTS: tl.constexpr, HEADS: tl.constexpr):
    """Return the record of a row of segments, its segment, and where the record belongs: its page,
    its layer of the pools, and its head. sizes: see `unpack_kernel`."""
    _, num_layers, first_layer = sizes
    record = row // NUM_SEGMENTS
    layers = record // HEADS
    page = layers // num_layers
    return (
        record,
        row % NUM_SEGMENTS,
        page,
        first_layer + layers - page * num_layers,
        record % HEADS,
    )


@triton.jit
def _place(pool, page, layer, head):
    """Return the pointers to records of a pool, see `unpack_kernel`."""
    pool_ptr, rows_ptr, stride_row, stride_layer, stride_head = pool
    place = tl.load(rows_ptr + page).to(tl.int64) * stride_row
    return pool_ptr + (place + layer.to(tl.int64) * stride_layer + head * stride_head)


@triton.jit
def _store_rows(
    tiles,
    records,
    raw_v,
    ranks,
    raw,
    sizes,
    PART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Store rows of `_in_rows` into raw records. Where a record does not fit, store its raw bits
    instead."""
    index = tl.arange(0, SEGMENTS * TILES * 16)[:, None]
    row = tl.program_id(0) * SEGMENTS + index // (TILES * 16)
    num_rows = sizes[0]
    mask = row < num_rows
    # Rows past the end read again, and store nothing.
    record, segment, page, layer, head = _locate(
        tl.minimum(row, num_rows - 1), sizes, NUM_SEGMENTS, HEADS
    )
    # Row and column, in tiles, of the stored operand.
    COLUMNS: tl.constexpr = (HEAD_DIM if PART == 0 else PAGE_SIZE) // 16
    tile = segment * TILES + index // 16 % TILES
    if PART == 0:
        token = tile // COLUMNS * 16 + index % 16
        # In pairs of channels.
        offs = token * (HEAD_DIM // 2) + tile % COLUMNS * 8 + tl.arange(0, 8)[None, :]
    else:
        token = tile % COLUMNS * 16 + index % 16
        offs = token * HEAD_DIM + tile // COLUMNS * 16 + tl.arange(0, 16)[None, :]
    item: tl.constexpr = tl.int32 if PART == 0 else tl.int16
    PART_WORDS: tl.constexpr = PAGE_SIZE * HEAD_DIM // 2
    target_ptr = _place(raw, page, layer, head) + PART * PART_WORDS
    target_ptr = target_ptr.to(tl.pointer_type(item)) + offs
    record_ptr = records[0] + record.to(tl.int64) * records[1]
    fits = tl.load(record_ptr) & 0xFFFF == 1
    tl.store(target_ptr, tiles, mask=mask & fits)
    mask_raw = mask & (fits == 0)
    # Few records do not fit, and most programs skip this.
    if tl.max(mask_raw.to(tl.int32)) > 0:
        if PART == 0:
            source_ptr = record_ptr + RAW_WORDS
            mask_load = mask_raw
        else:
            ranks_ptr, stride_row, stride_layer = ranks
            rank_ptr = ranks_ptr + (page * stride_row + layer * stride_layer + head)
            # Ranks count from 1. A record that was rewritten since ranks were given may have none.
            rank = tl.load(rank_ptr, mask=mask_raw, other=1).to(tl.int64) - 1
            source_ptr = raw_v[0] + rank * raw_v[1]
            mask_load = mask_raw & (rank >= 0) & (rank < raw_v[2])
        source_ptr = source_ptr.to(tl.pointer_type(item)) + offs
        bits = tl.load(source_ptr, mask=mask_load, other=0)
        tl.store(target_ptr, bits, mask=mask_raw)


@triton.jit
def _unpack_part(
    anchors,
    records,
    raw_v,
    ranks,
    raw,
    sizes,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HEADS: tl.constexpr,
    K_GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BODY_WORDS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Do the work of `unpack_kernel` for K (PART 0) or V (PART 1)."""
    RUNS: tl.constexpr = 16 * TILES
    thread = tl.arange(0, SEGMENTS * RUNS)
    # Without masks on loads, there are fewer instructions: what is past the end reads again.
    row = tl.minimum(tl.program_id(0) * SEGMENTS + thread // RUNS, sizes[0] - 1)
    run = thread % RUNS
    record, segment, page, layer, head = _locate(row, sizes, NUM_SEGMENTS, HEADS)
    widths, bases, size = _rules(
        _place(anchors, page, layer, head), segment, run, PART, FIELDS, PAGE_SIZE, HEAD_DIM, TILES,
        K_GROUP, DTYPE, MANTISSA_BITS, INTERPRET,
    )  # fmt: skip
    record_ptr = records[0] + record.to(tl.int64) * records[1]
    starts_ptr = (record_ptr + HEADER_WORDS).to(tl.pointer_type(tl.uint16)) + PART * NUM_SEGMENTS
    start = tl.load(starts_ptr + segment).to(tl.int32)
    body_ptr = (record_ptr + (HEADER_WORDS + NUM_SEGMENTS)).to(tl.pointer_type(tl.uint32))
    by_run = size.reshape(SEGMENTS, RUNS)
    before = tl.cumsum(by_run, axis=1).reshape(SEGMENTS * RUNS) - size
    values, escapes, count = _load_codes(
        body_ptr, widths, bases, start * 32 + before, MANTISSA_BITS, BODY_WORDS
    )
    lengths = packed_rules.for_each(tl.sum(by_run, axis=1), RUNS)
    place = start * 2 + (lengths + 15 >> 4) - count
    place += tl.cumsum(count.reshape(SEGMENTS, RUNS), axis=1).reshape(SEGMENTS * RUNS)
    values = _load_escapes(body_ptr, values, escapes, place, BODY_WORDS)
    _store_rows(
        _in_rows(values, PART, TILES, SEGMENTS), records, raw_v, ranks, raw, sizes, PART, PAGE_SIZE,
        HEAD_DIM, TILES, NUM_SEGMENTS, SEGMENTS, HEADS,
    )  # fmt: skip


# Places in lists of pages and of ranks differ from call to call.
@triton.jit(
    do_not_specialize=["num_rows", "num_layers", "first_layer", "num_raw_v", "stride_rank_row",
                       "stride_rank_layer"],
    do_not_specialize_on_alignment=["anchor_rows_ptr", "raw_rows_ptr", "ranks_ptr"],
)  # fmt: skip
def unpack_kernel(
    anchors_ptr,
    anchor_rows_ptr,
    records_ptr,
    raw_v_ptr,
    ranks_ptr,
    raw_ptr,
    raw_rows_ptr,
    num_rows,
    num_layers,
    first_layer,
    num_raw_v,
    stride_anchor_row,
    stride_anchor_layer,
    stride_anchor_head,
    stride_record,
    stride_raw_v,
    stride_rank_row,
    stride_rank_layer,
    stride_raw_row,
    stride_raw_layer,
    stride_raw_head,
    K_FIELDS: tl.constexpr,
    V_FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HEADS: tl.constexpr,
    K_GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BODY_WORDS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Unpack SEGMENTS segments of K or of V of any records a program: grid (num_rows / SEGMENTS,
    2). num_rows: segments of a part in all records, which are those of HEADS heads, of num_layers
    layers, of pages. first_layer: of the pools and of ranks.

    All pointers are int32, with strides in words, but three of integers: anchor_rows_ptr and
    raw_rows_ptr, each page's row of anchors_ptr and of raw_ptr; and ranks_ptr, the row of raw V of
    each record that does not fit, counted from 1. num_raw_v: rows of raw V. K_FIELDS, V_FIELDS and
    other arguments are those of `pack_kernel` for both parts.
    """
    anchors = (
        anchors_ptr, anchor_rows_ptr, stride_anchor_row, stride_anchor_layer, stride_anchor_head
    )  # fmt: skip
    raw = (raw_ptr, raw_rows_ptr, stride_raw_row, stride_raw_layer, stride_raw_head)
    records, raw_v = (records_ptr, stride_record), (raw_v_ptr, stride_raw_v, num_raw_v)
    ranks = (ranks_ptr, stride_rank_row, stride_rank_layer)
    sizes = (num_rows, num_layers, first_layer)
    if tl.program_id(1) == 0:
        _unpack_part(
            anchors, records, raw_v, ranks, raw, sizes, 0, K_FIELDS, PAGE_SIZE, HEAD_DIM, TILES,
            NUM_SEGMENTS, SEGMENTS, HEADS, K_GROUP, DTYPE, MANTISSA_BITS, BODY_WORDS, INTERPRET,
        )  # fmt: skip
    else:
        _unpack_part(
            anchors, records, raw_v, ranks, raw, sizes, 1, V_FIELDS, PAGE_SIZE, HEAD_DIM, TILES,
            NUM_SEGMENTS, SEGMENTS, HEADS, K_GROUP, DTYPE, MANTISSA_BITS, BODY_WORDS, INTERPRET,
        )  # fmt: skip
