"""Order of codes and metadata in a record (`formats.py`), as torch permutations.

Rows and columns are those of a matrix instruction's left operand: K [tokens, channels] or
V transposed [channels, tokens].
"""

from __future__ import annotations

import math

import torch

from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference import nibbles

TILE = 16
LANES = 32
WORD_CODES = 8

# Lowest bits of the fields of code 2 r + h in a log4 anchor word.
SIGN_BITS = tuple(15 - 4 * r + 16 * h for r in range(4) for h in range(2))
MAGNITUDE_BITS = tuple((4 - 4 * r + 16 * h) % 32 for r in range(4) for h in range(2))


def group_size(num_tiles: int) -> int:
    """Return how many tiles form a group, in which each lane's words are adjacent."""
    return 4 if num_tiles % 4 == 0 else 2


def to_words(operand: torch.Tensor) -> torch.Tensor:
    """Return values [..., rows, columns] in stored order, as a new [..., rows * columns / 8, 8]."""
    rows, columns = (size // TILE for size in operand.shape[-2:])
    leading = operand.shape[:-2]
    count = math.prod(leading)
    # row = 16 a + 8 b + g, column = 16 c + 8 d + 2 t + e; nibble = 4 d + 2 b + e.
    split = operand.reshape(count, rows, 2, 8, columns, 2, 4, 2)
    tiles = split.permute(0, 1, 4, 3, 6, 5, 2, 7)
    return _in_groups(tiles.reshape(*leading, rows * columns, LANES, WORD_CODES))


def from_words(words: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Invert to_words: turn [..., rows * columns / 8, 8] into a new [..., rows, columns]."""
    rows, columns = num_rows // TILE, num_columns // TILE
    leading = words.shape[:-2]
    split = _by_tile(words).reshape(math.prod(leading), rows, columns, 8, 4, 2, 2, 2)
    operand = split.permute(0, 1, 6, 3, 2, 5, 4, 7)
    return operand.reshape(*leading, num_rows, num_columns)


def _in_groups(tiles: torch.Tensor) -> torch.Tensor:
    """Return tiles or pairs [..., n, 32, 8] as words in stored order [..., n * 32, 8]."""
    size = group_size(tiles.shape[-3])
    grouped = torch.unflatten(tiles, -3, (-1, size)).transpose(-3, -2)
    return grouped.reshape(*tiles.shape[:-3], tiles.shape[-3] * LANES, WORD_CODES)


def _by_tile(words: torch.Tensor) -> torch.Tensor:
    """Invert _in_groups."""
    num_tiles = words.shape[-2] // LANES
    size = group_size(num_tiles)
    grouped = torch.unflatten(words, -2, (num_tiles // size, LANES, size))
    tiles = grouped.transpose(-3, -2)
    return tiles.reshape(*words.shape[:-2], num_tiles, LANES, WORD_CODES)


def column_order(values: torch.Tensor) -> torch.Tensor:
    """Return metadata of columns [..., columns] in stored order."""
    split = torch.unflatten(values, -1, (-1, 2, 4, 2))
    return split.movedim(-2, -4).flatten(-4)


def from_column_order(values: torch.Tensor) -> torch.Tensor:
    """Invert column_order."""
    split = torch.unflatten(values, -1, (4, -1, 2, 2))
    return split.movedim(-4, -2).flatten(-4)


def row_order(values: torch.Tensor) -> torch.Tensor:
    """Return metadata of rows [..., rows] in stored order."""
    return torch.unflatten(values, -1, (-1, 2, 8)).movedim(-1, -3).flatten(-3)


def from_row_order(values: torch.Tensor) -> torch.Tensor:
    """Invert row_order."""
    return torch.unflatten(values, -1, (8, -1, 2)).movedim(-3, -1).flatten(-3)


# K's metadata belongs to columns of its operand. V's metadata belongs to rows: of V's operand in
# log4 (per channel), and of the product of K and Q in uniform4 (per token).
STORE = {"k": column_order, "v": row_order}
LOAD = {"k": from_column_order, "v": from_row_order}


def codes_to_words(codes: torch.Tensor, part: str) -> torch.Tensor:
    """Return codes [N, P, H, D] of part "k" or "v" in stored order [N, H, P * D / 8, 8]."""
    return to_words(codes.permute((0, 2, 1, 3) if part == "k" else (0, 2, 3, 1)))


def codes_from_words(words: torch.Tensor, part: str, page_size: int) -> torch.Tensor:
    """Invert codes_to_words, but with another order of dimensions: a new [N, H, P, D]."""
    head_dim = words.shape[-2] * WORD_CODES // page_size
    if part == "k":
        return from_words(words, page_size, head_dim)
    return from_words(words, head_dim, page_size).transpose(-1, -2)


def packed_words(
    records: torch.Tensor, part: str, layout: RecordLayout, field: str = "codes"
) -> torch.Tensor:
    """Return a field of codes of records [N, H, nbytes] as uint8 [N, H, words, 4]. part: "k" or
    "v"."""
    return torch.unflatten(layout[f"{part}_{field}"].view(records), -1, (-1, 4)).contiguous()


def store_words(
    packed: torch.Tensor,
    records: torch.Tensor,
    part: str,
    layout: RecordLayout,
    field: str = "codes",
) -> None:
    """Write uint8 [N, H, words, 4] into a field of records, in place: inverts packed_words."""
    layout[f"{part}_{field}"].view(records).copy_(packed.flatten(-2))


def pack_by_halves(codes: torch.Tensor) -> torch.Tensor:
    """Pack the low 4 bits of codes [..., 8] into uint8 [..., 4], even codes before odd codes."""
    return nibbles.pack(torch.unflatten(codes, -1, (4, 2)).transpose(-1, -2).flatten(-2))


def by_halves(nibble_values: torch.Tensor) -> torch.Tensor:
    """Return the codes [..., 8] of unpacked nibbles [..., 8] of a word from pack_by_halves."""
    return torch.unflatten(nibble_values, -1, (2, 4)).transpose(-1, -2).flatten(-2)


def pack_pairs(words: torch.Tensor) -> torch.Tensor:
    """Pack 2-bit codes of tiles [..., words, 8] into words of pairs, uint8 [..., words / 2, 4]."""
    left, right = torch.unflatten(_by_tile(words), -3, (-1, 2)).unbind(-3)
    return pack_by_halves(_in_groups(left | right << 2))


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Invert pack_pairs: turn uint8 [..., words / 2, 4] into uint8 [..., words, 8]."""
    pairs = _by_tile(by_halves(nibbles.unpack(packed)))
    return _in_groups(torch.stack((pairs & 3, pairs >> 2), dim=-3).flatten(-4, -3))


def pack_sign_magnitude(codes: torch.Tensor) -> torch.Tensor:
    """Pack log4 codes [..., 8], magnitude in bits 0-2 and sign in bit 3, into uint8 [..., 4]."""
    wide = codes.to(torch.int64)
    signs, magnitudes = (_bits(of, codes.device) for of in (SIGN_BITS, MAGNITUDE_BITS))
    words = ((wide >> 3 & 1) << signs | (wide & 7) << magnitudes).sum(-1, keepdim=True)
    return (words >> _bits((0, 8, 16, 24), codes.device) & 255).to(torch.uint8)


def unpack_sign_magnitude(packed: torch.Tensor) -> torch.Tensor:
    """Invert pack_sign_magnitude: turn uint8 [..., 4] into uint8 [..., 8]."""
    words = packed.contiguous().view(torch.int32)
    signs, magnitudes = (_bits(of, packed.device) for of in (SIGN_BITS, MAGNITUDE_BITS))
    # Shifts are arithmetic; the masks drop the copies of bit 31.
    return ((words >> signs & 1) << 3 | words >> magnitudes & 7).to(torch.uint8)


def _bits(places: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int32, device=device)
