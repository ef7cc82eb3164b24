"""Triton kernel that packs raw residual records of the target exact (`packed_format.py`).

A thread has a run of 16 values (`packed_rules.py`). Their codes have 48 bits or more, so a word of
the body belongs to at most two runs. A thread stores each word that its codes fill, once: it joins
the last bits of the run before to its first word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels import packed_format
from kvspec_kernels.codecs import packed_sizes
from kvspec_kernels.jit import packed_rules

HEADER_WORDS = tl.constexpr(packed_sizes.HEADER_BYTES // 4)
RAW_WORDS = tl.constexpr(packed_format.RAW_OFFSET // 4)
# The least width of a code, beside the bits of the mantissa.
FAR_BITS = tl.constexpr(packed_format.FAR_BITS)
BLOCK_WORDS = tl.constexpr(128)


@triton.jit
def _load_raw_pair(
    raw_ptr,
    tile_row,
    tile_column,
    lane,
    q: tl.constexpr,
    PART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return the bits, sign-extended, of a lane's codes 2q and 2q + 1 of a tile. raw_ptr: int16,
    start of the raw records."""
    row = tile_row * 16 + (q & 1) * 8 + (lane >> 2)
    column = tile_column * 16 + (q >> 1) * 8 + ((lane & 3) << 1)
    if PART == 0:
        # Two channels of a token.
        words_ptr = raw_ptr.to(tl.pointer_type(tl.int32))
        pair = tl.load(words_ptr + (row * HEAD_DIM + column) // 2)
        return pair << 16 >> 16, pair >> 16
    else:
        # Two tokens of a channel.
        first_ptr = raw_ptr + (PAGE_SIZE * HEAD_DIM + column * HEAD_DIM + row)
        return tl.load(first_ptr).to(tl.int32), tl.load(first_ptr + HEAD_DIM).to(tl.int32)


@triton.jit
def _pack_codes(
    anchor_ptr,
    raw_ptr,
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
    """Return what a run adds to its segment: pairs of codes, their widths, the bits of all values,
    flags of those that escaped, and the bits of all codes + 65536 * escapes."""
    codes, widths, values = (), (), ()
    escapes, size = tl.zeros_like(run), tl.zeros_like(run)
    lane = run // (TILES // 2)
    words_ptr = anchor_ptr + (FIELDS[0] + segment * (32 * TILES) + run * 2)
    for i in tl.static_range(2):
        row, column = packed_rules.locate_tile(segment, run, i, PART, PAGE_SIZE, HEAD_DIM, TILES)
        word = tl.load(words_ptr + i)
        prepared = packed_rules.prepare_tile(
            anchor_ptr, row, column, lane, PART, FIELDS, PAGE_SIZE, HEAD_DIM, K_GROUP, DTYPE
        )
        for q in tl.static_range(4):
            x0, x1 = _load_raw_pair(raw_ptr, row, column, lane, q, PART, PAGE_SIZE, HEAD_DIM)
            p0, p1 = prepared[q // 2 * 2], prepared[q // 2 * 2 + 1]
            w0, near0, order0 = packed_rules.value_rule(
                word, 4 * q, p0, DTYPE, MANTISSA_BITS, INTERPRET
            )
            w1, near1, order1 = packed_rules.value_rule(
                word, 4 * q + 16, p1, DTYPE, MANTISSA_BITS, INTERPRET
            )
            code0, escaped0 = packed_rules.code_of(x0, w0, near0, order0, p0[3])
            code1, escaped1 = packed_rules.code_of(x1, w1, near1, order1, p1[3])
            e0, e1 = escaped0.to(tl.int32), escaped1.to(tl.int32)
            escapes |= e0 << 8 * i + 2 * q | e1 << 8 * i + 2 * q + 1
            size += w0 + w1 + (e0 + e1 << 16)
            codes += (code0 | code1 << w0,)
            widths += (w0 + w1,)
            values += (x0, x1)
    return codes, widths, values, escapes, size


@triton.jit
def _store_codes(
    body_ptr,
    codes,
    widths,
    begin,
    run,
    mask,
    RUNS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
):
    """Store the codes of runs, of which there are RUNS in a segment, from bit `begin` of the body
    on. body_ptr: int32."""
    LEAST: tl.constexpr = 2 * (MANTISSA_BITS + FAR_BITS)
    # Runs that are masked store nothing: none of their words becomes full.
    full = tl.where(mask, 32, 4096)
    at = begin
    word = tl.zeros_like(begin)
    first_word = word
    for j in tl.static_range(8):
        shifted = codes[j].to(tl.int64) << (at & 31).to(tl.int64)
        word |= shifted.to(tl.int32)
        is_full = (at & 31) + widths[j] >= full
        mask_store = is_full
        # After these pairs, every run has come to its second word.
        if j * LEAST < 32:
            is_first = at >> 5 == begin >> 5
            first_word = tl.where(is_full & is_first, word, first_word)
            mask_store = is_full & (is_first == 0)
        tl.store(body_ptr + (at >> 5), word, mask=mask_store)
        word = tl.where(is_full, (shifted >> 32).to(tl.int32), word)
        at += widths[j]
    # The last bits of a run begin the first word of the next one. A segment begins with a word.
    by_segment = word.reshape(word.numel // RUNS, RUNS)
    run_before = tl.maximum(tl.arange(0, RUNS)[None, :] - 1, 0) + tl.zeros_like(by_segment)
    before = tl.gather(by_segment, run_before, axis=1).reshape(word.numel)
    first_word |= tl.where(run == 0, 0, before)
    tl.store(body_ptr + (begin >> 5), first_word, mask=mask)
    # Escapes may follow in the upper half of a segment's last word.
    halves_ptr = body_ptr.to(tl.pointer_type(tl.int16)) + (at >> 5) * 2
    mask_last = mask & (run == RUNS - 1)
    tl.store(halves_ptr, word.to(tl.int16), mask=mask_last & (at & 31 > 0))
    tl.store(halves_ptr + 1, (word >> 16).to(tl.int16), mask=mask_last & (at & 31 > 16))


@triton.jit
def _pack_segments(
    anchor_ptr,
    raw_ptr,
    record_ptr,
    segment,
    run,
    mask,
    used,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    RECORDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    K_GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BODY_WORDS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Pack `segment` of records behind the `used` words of the segments before, and return the
    words used then. used: [RECORDS, 1]. Other tensors: [RECORDS * SEGMENTS * runs]; what mask
    excludes is read but not stored."""
    RUNS: tl.constexpr = 16 * TILES
    codes, widths, values, escapes, size = _pack_codes(
        anchor_ptr, raw_ptr, segment, run, PART, FIELDS, PAGE_SIZE, HEAD_DIM, TILES, K_GROUP, DTYPE,
        MANTISSA_BITS, INTERPRET,
    )  # fmt: skip
    # One sum for two numbers: the codes of a segment have less than 2^16 bits.
    size = tl.where(mask, size, 0)
    by_run = size.reshape(RECORDS * SEGMENTS, RUNS)
    before = tl.cumsum(by_run, axis=1).reshape(size.numel) - size
    sizes = tl.sum(by_run, axis=1)
    num_words = ((sizes & 0xFFFF) + 15 >> 4) + (sizes >> 16) + 1 >> 1
    by_record = num_words.reshape(RECORDS, SEGMENTS)
    first = used + tl.cumsum(by_record, axis=1) - by_record
    first = packed_rules.for_each(first.reshape(RECORDS * SEGMENTS), RUNS)
    sizes = packed_rules.for_each(sizes, RUNS)
    code_halves = (sizes & 0xFFFF) + 15 >> 4
    num_halves = code_halves + (sizes >> 16)
    starts_ptr = (record_ptr + HEADER_WORDS).to(tl.pointer_type(tl.int16)) + PART * NUM_SEGMENTS
    tl.store(starts_ptr + segment, first.to(tl.int16), mask=mask & (run == 0))

    body_ptr = record_ptr + (HEADER_WORDS + NUM_SEGMENTS)
    mask &= first + (num_halves + 1 >> 1) <= BODY_WORDS
    begin = first * 32 + (before & 0xFFFF)
    _store_codes(body_ptr, codes, widths, begin, run, mask, RUNS, MANTISSA_BITS)
    halves_ptr = body_ptr.to(tl.pointer_type(tl.int16)) + first * 2
    place = code_halves + (before >> 16)
    escapes = tl.where(mask, escapes, 0)
    for j in tl.static_range(16):
        escaped = escapes >> j & 1
        tl.store(halves_ptr + place, values[j].to(tl.int16), mask=escaped != 0)
        place += escaped
    mask_odd = mask & (num_halves & 1 != 0) & (run == 0)
    tl.store(halves_ptr + num_halves, tl.zeros_like(first).to(tl.int16), mask=mask_odd)
    return used + tl.sum(by_record, axis=1)[:, None]


@triton.jit
def _finish_records(
    k_ptr,
    record_ptr,
    place,
    used,
    mask,
    K_WORDS: tl.constexpr,
    BODY: tl.constexpr,
    BODY_WORDS: tl.constexpr,
):
    """Store the words that are not written yet, and the mark of records that fit: all words of a
    record that does not fit. k_ptr: int32, raw K. place: of a thread in a block of words. BODY:
    words before the body."""
    fits = used <= BODY_WORDS
    first_word = tl.where(fits, BODY + used, 0)
    for begin in range(tl.min(first_word), BODY + BODY_WORDS, BLOCK_WORDS):
        word = begin + place
        mask_word = mask & (word >= first_word) & (word < BODY + BODY_WORDS)
        is_raw = (word >= RAW_WORDS) & (word < RAW_WORDS + K_WORDS) & (fits == 0)
        bits = tl.load(k_ptr + (word - RAW_WORDS), mask=mask_word & is_raw, other=0)
        tl.store(record_ptr + word, bits, mask=mask_word)
    tl.store(record_ptr, tl.zeros_like(used) + 1, mask=mask & fits & (place == 0))


@triton.jit(do_not_specialize=["num_records"])
def pack_kernel(
    anchors_ptr,
    raw_ptr,
    records_ptr,
    used_ptr,
    num_records,
    stride_anchor,
    stride_raw,
    stride_record,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    RECORDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    K_GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BODY_WORDS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Pack K (PART 0), or then V (PART 1), of RECORDS records a program, SEGMENTS segments at a
    time: grid (num_records / RECORDS,).

    anchors_ptr, records_ptr: int32, raw_ptr: int16, with strides in these. used_ptr: int32
    [num_records], words of the body that a record needs. FIELDS: offsets of codes, scale and zero
    of the part in an anchor, in words. TILES: of a segment, 2 or 4.
    """
    RUNS: tl.constexpr = 16 * TILES
    first_record = tl.program_id(0).to(tl.int64) * RECORDS
    record = first_record + tl.arange(0, RECORDS)[:, None]
    mask_record = record < num_records
    used = tl.zeros((RECORDS, 1), tl.int32)
    if PART == 1:
        used = tl.load(used_ptr + record, mask=mask_record, other=0)
    thread = tl.arange(0, RECORDS * SEGMENTS * RUNS)
    run = thread % RUNS
    mine = first_record + thread // (SEGMENTS * RUNS)
    # Without masks on loads, there are fewer instructions: what is past the end reads again.
    mask = mine < num_records
    mine = tl.minimum(mine, num_records - 1)
    for begin in range(0, NUM_SEGMENTS, SEGMENTS):
        segment = begin + thread // RUNS % SEGMENTS
        used = _pack_segments(
            anchors_ptr + mine * stride_anchor, raw_ptr + mine * stride_raw,
            records_ptr + mine * stride_record, tl.minimum(segment, NUM_SEGMENTS - 1), run,
            mask & (segment < NUM_SEGMENTS), used, PART, FIELDS, PAGE_SIZE, HEAD_DIM, TILES,
            NUM_SEGMENTS, RECORDS, SEGMENTS, K_GROUP, DTYPE, MANTISSA_BITS, BODY_WORDS, INTERPRET,
        )  # fmt: skip
    tl.store(used_ptr + record, used, mask=mask_record)
    if PART == 1:
        # Other threads wrote what a record that does not fit must not keep.
        tl.debug_barrier()
        thread = tl.arange(0, RECORDS * BLOCK_WORDS)
        mine = first_record + thread // BLOCK_WORDS
        mask = mine < num_records
        mine = tl.minimum(mine, num_records - 1)
        _finish_records(
            (raw_ptr + mine * stride_raw).to(tl.pointer_type(tl.int32)),
            records_ptr + mine * stride_record, thread % BLOCK_WORDS,
            packed_rules.for_each(used.reshape(RECORDS), BLOCK_WORDS), mask,
            PAGE_SIZE * HEAD_DIM // 2, HEADER_WORDS + NUM_SEGMENTS, BODY_WORDS,
        )  # fmt: skip
