"""The stored order of codes and metadata, compared index by index with the description in
formats.py."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.reference import fragments, nibbles

SHAPES = [(32, 16), (64, 64), (16, 32), (96, 128), (128, 80)]


def position(row, column, num_rows, num_columns):
    """Return word and nibble of an element, by the rule in formats.py."""
    tile = row // 16 * (num_columns // 16) + column // 16
    num_tiles = num_rows * num_columns // 256
    size = 4 if num_tiles % 4 == 0 else 2
    r, c = row % 16, column % 16
    lane = 4 * (r % 8) + c % 8 // 2
    word = (tile // size * 32 + lane) * size + tile % size
    return word, 4 * (c // 8) + 2 * (r // 8) + c % 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_lie_where_the_format_says(shape):
    rows, columns = shape
    operand = torch.arange(rows * columns).view(1, rows, columns)
    words = fragments.to_words(operand)
    assert words.shape == (1, rows * columns // 8, 8)
    for row in range(rows):
        for column in range(columns):
            word, nibble = position(row, column, rows, columns)
            assert words[0, word, nibble] == operand[0, row, column]
    assert torch.equal(fragments.from_words(words, rows, columns), operand)


@pytest.mark.parametrize("shape", [(32, 32), (64, 64), (32, 96), (96, 128), (128, 96)], ids=str)
def test_pairs_of_tiles_lie_where_the_format_says(shape):
    rows, columns = shape
    codes = torch.randint(4, (1, rows, columns), generator=torch.Generator().manual_seed(0))
    packed = fragments.pack_pairs(fragments.to_words(codes))
    assert packed.shape == (1, rows * columns // 16, 4)
    words = [int.from_bytes(bytes(word), "little") for word in packed[0].tolist()]
    num_pairs = rows * columns // 512
    size = 4 if num_pairs % 4 == 0 else 2
    # Nibbles of codes 0 to 7.
    places = [0, 4, 1, 5, 2, 6, 3, 7]
    for row in range(rows):
        for column in range(columns):
            pair = row // 16 * (columns // 32) + column // 32
            r, c = row % 16, column % 16
            lane = 4 * (r % 8) + c % 8 // 2
            word = words[(pair // size * 32 + lane) * size + pair % size]
            nibble = places[4 * (c // 8) + 2 * (r // 8) + c % 2]
            high = column // 16 % 2
            assert word >> 4 * nibble + 2 * high & 3 == codes[0, row, column]
    assert torch.equal(fragments.unpack_pairs(packed), fragments.to_words(codes).to(torch.uint8))


@pytest.mark.parametrize("size", [16, 64, 96, 256])
def test_metadata_lies_where_the_format_says(size):
    values = torch.arange(3 * size).view(3, size)
    by_column, by_row = fragments.column_order(values), fragments.row_order(values)
    for i in range(size):
        tile, inner = divmod(i, 16)
        t, which = inner % 8 // 2, 2 * (inner // 8) + inner % 2
        assert by_column[1, (t * (size // 16) + tile) * 4 + which] == values[1, i]
        g, half = inner % 8, inner // 8
        assert by_row[1, (g * (size // 16) + tile) * 2 + half] == values[1, i]
    assert torch.equal(fragments.from_column_order(by_column), values)
    assert torch.equal(fragments.from_row_order(by_row), values)


def test_signs_and_magnitudes_have_their_own_bits():
    for r in range(4):
        for h in range(2):
            for value in range(16):
                codes = torch.zeros(8, dtype=torch.uint8)
                codes[2 * r + h] = value
                packed = fragments.pack_sign_magnitude(codes)
                word = int.from_bytes(bytes(packed.tolist()), "little")
                # The kernel's view: rotated and masked, each code gives a sign and a magnitude as
                # fp16 halves.
                rotated = (word << 4 * r | word >> (32 - 4 * r)) & 0x80708070
                assert rotated >> 16 * h == (value >> 3) << 15 | (value & 7) << 4
    codes = torch.randint(0, 16, (100, 8), dtype=torch.uint8)
    packed = fragments.pack_sign_magnitude(codes)
    assert torch.equal(fragments.unpack_sign_magnitude(packed), codes)


def test_halves_hold_even_and_odd_codes():
    codes = torch.arange(8)
    packed = fragments.pack_by_halves(codes)
    word = int.from_bytes(bytes(packed.tolist()), "little")
    assert [word >> 4 * i & 15 for i in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(fragments.by_halves(nibbles.unpack(packed)), codes.to(torch.uint8))
