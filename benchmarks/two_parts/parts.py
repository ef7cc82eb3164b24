"""Weights in bf16 as two parts, in plain torch: 8 bits that drafts read, and 4 more bits that make
them exact.

The exponents of a row lie close together. The first part of a value has its sign, a code of 4 bits
for the exponent, counted from the largest one of the row, and the upper 3 bits of the mantissa. The
second part has the lower 4 bits. So 16 binades below a row's largest value are exact in 12 bits.
Values that lie below are listed in full, with their places: about one in 10,000, where weights are
normally distributed. The parts hold the smallest number of the 16 binades in their places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvspec_kernels.reference import nibbles

# Exponents that a row may have besides those of listed values.
BINADES = 16
# Most listed values of a row.
MOST_SMALL = 64
# bf16 bits of the smallest number: code 0 is the exponent 112, so code 15 is that of numbers from 1
# to 2. Drafts take the middle of what the second part may add.
BASE, MIDDLE = 0x3800, 8
# Smallest largest exponent, for which all 16 binades are normal numbers.
LEAST_EXPONENT = BINADES + 1
# Rows that are encoded at once, to bound temporary memory.
BLOCK = 4096


class TwoParts(NamedTuple):
    """A weight [N, K].

    first: uint8 [N, K], from the highest bit: sign, exponent code, 3 bits of the mantissa. second:
    uint8 [N, K / 2 rounded up], 4 bits each, low nibble first. scale: fp32 [N], powers of two, or 0
    for rows of zeros. small_at: int32 [S, N], inputs of listed values, -1 where a row has fewer.
    small: bf16 [S, N], these values. num_inputs: K.
    """

    first: torch.Tensor
    second: torch.Tensor
    scale: torch.Tensor
    small_at: torch.Tensor
    small: torch.Tensor
    num_inputs: int

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self[:5])


def encode(weight: torch.Tensor) -> TwoParts:
    """Return a weight, bf16 [N, K], in two parts.

    Raises ValueError for other dtypes, for values that are not finite, for rows whose largest value
    is below 2^-110, and for rows with more than MOST_SMALL values below their 16 binades.
    """
    if weight.dtype != torch.bfloat16 or weight.ndim != 2 or not weight.numel():
        raise ValueError(f"weight {list(weight.shape)} is {weight.dtype}, must be bf16 [N, K]")
    blocks = [_encode_rows(rows) for rows in weight.split(BLOCK)]
    most = max(len(block.small) for block in blocks)
    if most > MOST_SMALL:
        raise ValueError(
            f"a row of {weight.shape[1]} inputs has {most} values below 16 binades, at most "
            f"{MOST_SMALL} are allowed"
        )
    first, second, scale = (
        torch.cat(parts) for parts in zip(*(b[:3] for b in blocks), strict=True)
    )
    at = [_padded(block.small_at, most, -1) for block in blocks]
    small = [_padded(block.small, most, 0) for block in blocks]
    return TwoParts(first, second, scale, torch.cat(at, 1), torch.cat(small, 1), weight.shape[1])


def _encode_rows(weight: torch.Tensor) -> TwoParts:
    bits = weight.contiguous().view(torch.int16).to(torch.int32)
    exponent = bits >> 7 & 255
    largest = exponent.amax(1)
    if bool((largest == 255).any()):
        raise ValueError("a weight in two parts must be finite")
    if bool(((largest < LEAST_EXPONENT) & (weight != 0).any(1)).any()):
        raise ValueError("a row of a weight in two parts has no value of 2^-110 or more")
    code = exponent - largest[:, None] + BINADES - 1
    is_small = code < 0
    rest = torch.where(is_small, 0, code << 7 | bits & 127)
    first = (bits >> 8 & 128 | rest >> 4).to(torch.uint8)
    low = torch.nn.functional.pad(rest & 15, (0, weight.shape[1] % 2))
    scale = (largest << 23).view(torch.float32)
    small_at, small = _listed(weight, is_small)
    second = nibbles.pack(low.to(torch.uint8))
    return TwoParts(first, second, scale, small_at, small, weight.shape[1])


def _listed(weight: torch.Tensor, is_small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, inputs = is_small.nonzero(as_tuple=True)
    counts = is_small.sum(1)
    begins = counts.cumsum(0) - counts
    order = torch.arange(len(rows), device=rows.device) - begins[rows]
    size = (int(counts.max()), len(weight))
    small_at = torch.full(size, -1, dtype=torch.int32, device=weight.device)
    small_at[order, rows] = inputs.int()
    small = weight.new_zeros(size)
    small[order, rows] = weight[rows, inputs]
    return small_at, small


def _padded(listed: torch.Tensor, count: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(listed, (0, 0, 0, count - len(listed)), value=value)


def decode(parts: TwoParts) -> torch.Tensor:
    """Return the weight, bf16 [N, K], with the bits that encode() was given."""
    value = _scaled(parts, nibbles.unpack(parts.second)[:, : parts.num_inputs]).bfloat16()
    listed, rows = (parts.small_at >= 0).nonzero(as_tuple=True)
    value[rows, parts.small_at[listed, rows].long()] = parts.small[listed, rows]
    return value


def decode_first(parts: TwoParts) -> torch.Tensor:
    """Return what drafts read, fp32 [N, K]: the first part, and the middle of the second."""
    return _scaled(parts, torch.full_like(parts.first, MIDDLE))


def _scaled(parts: TwoParts, low: torch.Tensor) -> torch.Tensor:
    first = parts.first.to(torch.int32)
    bits = (first & 128) << 8 | BASE | (first & 127) << 4 | low
    return (bits << 16).view(torch.float32) * parts.scale[:, None]
