"""Store words of codes in the fields of records.

Words are int32 [columns, rows, chunks], at the positions of `page_pairs.py`. Pairs there are pairs
of channels. Pairs here are pairs of tiles, as in formats.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.sizes import next_power_of_2


@triton.jit
def store_k(
    codes_ptr,
    corrections_ptr,
    codes,
    corrections,
    chunk,
    row,
    col,
    mask,
    CHUNK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
):
    """Store K's words of codes, as the codecs make them for ANCHOR_BITS, and words of corrections
    if WITH_CORRECTIONS."""
    offsets = _k_word_offsets(chunk, row, col, CHUNK, HEAD_DIM // 4, TILE_GROUP)
    if ANCHOR_BITS == 4:
        tl.store(codes_ptr + offsets, codes, mask=mask)
    else:
        rest_ptr = corrections_ptr + PAGE_SIZE * HEAD_DIM // 8
        _store_k_pairs(codes_ptr, rest_ptr, codes, CHUNK, PAGE_SIZE, HEAD_DIM, WITH_CORRECTIONS)
    if WITH_CORRECTIONS:
        tl.store(corrections_ptr + offsets, corrections, mask=mask)


@triton.jit
def store_v(
    codes_ptr,
    corrections_ptr,
    codes,
    corrections,
    chunk,
    row,
    col,
    mask,
    CHUNK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
):
    """Store V's words likewise. codes, corrections: words of h = 0 and of h = 1."""
    if ANCHOR_BITS == 4:
        _store_v_words(
            codes_ptr,
            codes[0],
            codes[1],
            chunk,
            row,
            col,
            mask,
            CHUNK,
            PAGE_SIZE,
            HEAD_DIM,
            TILE_GROUP,
        )
    else:
        rest_ptr = corrections_ptr + PAGE_SIZE * HEAD_DIM // 8
        _store_v_pairs(
            codes_ptr,
            rest_ptr,
            codes[0],
            codes[1],
            CHUNK,
            PAGE_SIZE,
            HEAD_DIM,
            WITH_CORRECTIONS,
        )
    if WITH_CORRECTIONS:
        _store_v_words(
            corrections_ptr,
            corrections[0],
            corrections[1],
            chunk,
            row,
            col,
            mask,
            CHUNK,
            PAGE_SIZE,
            HEAD_DIM,
            TILE_GROUP,
        )


@triton.jit
def _word_offsets(tile, lane, TILE_GROUP: tl.constexpr):
    """Return the offsets, in words, of a lane's words of a tile in a field of codes."""
    return (tile // TILE_GROUP) * (32 * TILE_GROUP) + lane * TILE_GROUP + tile % TILE_GROUP


@triton.jit
def _k_word_offsets(
    chunk,
    row,
    col,
    CHUNK: tl.constexpr,
    NUM_COLS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):
    """Return _word_offsets of K's positions. A warp that stores there fills whole sectors."""
    tile = (chunk * (CHUNK // 16) + row // 8) * (NUM_COLS // 4) + col // 4
    return _word_offsets(tile, 4 * (row % 8) + col % 4, TILE_GROUP)


@triton.jit
def _store_v_words(
    codes_ptr,
    words0,
    words1,
    chunk,
    row,
    col,
    mask,
    CHUNK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):
    """Store V's words of h = 0 and h = 1, each [columns, rows, chunks] int32, in stored order."""
    COL_TILES: tl.constexpr = PAGE_SIZE // 16
    ROW_TILES: tl.constexpr = HEAD_DIM // 16
    TILES: tl.constexpr = COL_TILES * ROW_TILES
    if words0.numel == TILES * 16:
        # Reorder first: in register order, every 4 bytes would go to another sector.
        split = tl.join(words0, words1).reshape(ROW_TILES, 4, CHUNK // 16, 4, PAGE_SIZE // CHUNK, 2)
        by_tile = split.permute(0, 4, 2, 1, 5, 3)
        tiles = by_tile.reshape(TILES // TILE_GROUP, TILE_GROUP, 32)
        ordered = tiles.permute(0, 2, 1).reshape(TILES * 32)
        tl.store(codes_ptr + tl.arange(0, TILES * 32), ordered)
    else:
        tile = col // 4 * COL_TILES + chunk * (CHUNK // 16) + row // 4
        lane = 8 * (col % 4) + row % 4
        tl.store(codes_ptr + _word_offsets(tile, lane, TILE_GROUP), words0, mask=mask)
        tl.store(codes_ptr + _word_offsets(tile, lane + 4, TILE_GROUP), words1, mask=mask)


@triton.jit
def _store_k_pairs(
    codes_ptr,
    rest_ptr,
    words,
    CHUNK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WITH_REST: tl.constexpr,
):
    """Store K's words of codes, numbered in the order of values, as pairs of tiles. The halves of
    the codes go to two fields, the rest only if WITH_REST."""
    CHUNKS: tl.constexpr = PAGE_SIZE // CHUNK
    ROWS: tl.constexpr = next_power_of_2(CHUNK // 16)
    PAIRS: tl.constexpr = next_power_of_2(HEAD_DIM // 32)
    split = words.reshape(PAIRS, 2, 4, ROWS, 8, next_power_of_2(CHUNKS))
    by_tile = split.permute(5, 3, 0, 4, 2, 1)
    _store_pairs(codes_ptr, rest_ptr, by_tile, CHUNKS, CHUNK // 16, HEAD_DIM // 32, WITH_REST)


@triton.jit
def _store_v_pairs(
    codes_ptr,
    rest_ptr,
    words0,
    words1,
    CHUNK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WITH_REST: tl.constexpr,
):
    """Store V's words of h = 0 and h = 1 likewise. CHUNK is a multiple of 32, so that no pair
    straddles two chunks."""
    CHUNKS: tl.constexpr = PAGE_SIZE // CHUNK
    ROWS: tl.constexpr = next_power_of_2(HEAD_DIM // 16)
    PAIRS: tl.constexpr = next_power_of_2(CHUNK // 32)
    both = tl.join(words0, words1)
    split = both.reshape(ROWS, 4, PAIRS, 2, 4, next_power_of_2(CHUNKS), 2)
    by_tile = split.permute(0, 5, 2, 1, 6, 4, 3)
    _store_pairs(codes_ptr, rest_ptr, by_tile, HEAD_DIM // 16, CHUNKS, CHUNK // 32, WITH_REST)


@triton.jit
def _store_pairs(
    codes_ptr,
    rest_ptr,
    by_tile,
    OUTER: tl.constexpr,
    MIDDLE: tl.constexpr,
    INNER: tl.constexpr,
    WITH_REST: tl.constexpr,
):
    """Store words [..., 2] by pair, lane and tile of the pair. There are OUTER * MIDDLE * INNER
    pairs; by_tile has each of these sizes padded to a power of two."""
    PAIRS: tl.constexpr = OUTER * MIDDLE * INNER
    GROUP: tl.constexpr = 4 if PAIRS % 4 == 0 else 2
    PADDED: tl.constexpr = by_tile.numel // 64
    if PADDED == PAIRS:
        # Bring words into the order of the field, to fill whole sectors.
        tiles = by_tile.reshape(PAIRS // GROUP, GROUP, 32, 2).permute(0, 2, 1, 3)
        left, right = tl.split(tiles.reshape(PAIRS * 32, 2))
        offsets = tl.arange(0, PAIRS * 32)
        mask = offsets >= 0
    else:
        left, right = tl.split(by_tile.reshape(PADDED, 32, 2))
        INNERS: tl.constexpr = next_power_of_2(INNER)
        MIDDLES: tl.constexpr = next_power_of_2(MIDDLE)
        place = tl.arange(0, PADDED)[:, None]
        inner, middle = place % INNERS, place // INNERS % MIDDLES
        outer = place // (INNERS * MIDDLES)
        pair = (outer * MIDDLE + middle) * INNER + inner
        offsets = _word_offsets(pair, tl.arange(0, 32)[None, :], GROUP)
        mask = (inner < INNER) & (middle < MIDDLE) & (outer < OUTER)
    # -858993460 is 0xCCCCCCCC.
    codes = ((left >> 2) & 0x33333333) | (right & -858993460)
    tl.store(codes_ptr + offsets, codes, mask=mask)
    if WITH_REST:
        rest = (left & 0x33333333) | ((right & 0x33333333) << 2)
        tl.store(rest_ptr + offsets, rest, mask=mask)
