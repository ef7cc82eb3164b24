"""Weights of checkpoints in 4 bits, as published in the formats GPTQ and AWQ.

Both hold a weight [N, K] with its inputs first, 8 codes of 4 bits in an int32, and a scale s and an
integer zero z for each group of inputs and each column: a code u stands for (u - z) s. GPTQ packs 8
inputs of a column in a word, AWQ 8 columns of an input, in an order of its own.
"""

from __future__ import annotations

import torch

from kvspec_kernels.reference import nibbles
from kvspec_kernels.reference.int4_weights import GROUP, Int4Weight

CODES_IN_WORD = 8
# Column of each nibble of a word in AWQ, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def from_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, zero_is_less: bool
) -> Int4Weight:
    """Return a weight of GPTQ.

    qweight: int32 [K / 8, N]. qzeros: int32 [groups, N / 8]. scales: floating [groups, N].
    zero_is_less: stored zeros are one less than z, as in the first version of the format. Raises
    ValueError for shapes that do not fit, or groups that are no multiple of GROUP.
    """
    codes = _unpacked(qweight).transpose(1, 2).flatten(0, 1)
    zeros = _unpacked(qzeros).flatten(1) + int(zero_is_less)
    return _weight(codes, zeros, scales)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Int4Weight:
    """Return a weight of AWQ.

    qweight: int32 [K, N / 8]. qzeros: int32 [groups, N / 8]. scales: floating [groups, N]. Raises
    ValueError as from_gptq().
    """
    codes, zeros = (_unpacked(part)[..., _PLACES].flatten(1) for part in (qweight, qzeros))
    return _weight(codes, zeros, scales)


def stacked(weights: list[Int4Weight]) -> Int4Weight:
    """Return weights of equal inputs as one, their rows in order."""
    return Int4Weight(
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scale for weight in weights]),
        torch.cat([weight.zero for weight in weights]),
        weights[0].num_inputs,
    )


# Nibble of each column in AWQ.
_PLACES = [AWQ_ORDER.index(column) for column in range(CODES_IN_WORD)]


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., words, 8] of int32 [..., words], the lowest bits first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 15).to(torch.uint8)


def _weight(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Int4Weight:
    """Return a weight of codes [K, N], with zeros and scales [groups, N]."""
    num_inputs, num_columns = codes.shape
    num_groups = len(scales)
    if zeros.shape != scales.shape or scales.shape[1] != num_columns or num_inputs % num_groups:
        raise ValueError(
            f"codes {list(codes.shape)}, zeros {list(zeros.shape)} and scales "
            f"{list(scales.shape)} do not fit"
        )
    group = num_inputs // num_groups
    if group % GROUP:
        raise ValueError(f"groups of {group} inputs (allowed: multiples of {GROUP})")

    def by_row(grid: torch.Tensor) -> torch.Tensor:
        return grid.t().repeat_interleave(group // GROUP, 1).bfloat16()

    scale = scales.float()
    zero = -zeros.float() * scale
    return Int4Weight(nibbles.pack(codes.t()), by_row(scale), by_row(zero), num_inputs)
