"""Weights of a linear layer in 4 bits, for drafts (QuantSpec, section 4), in plain torch.

A row is cut into groups of GROUP inputs. A code u in 0..15 stands for u s + z, with a scale s and a
zero z for each group, both bf16: 4.5 bits a weight. `round_to_nearest` takes s and z from the range
of the group. `half_quadratic` then moves z: errors of most weights shrink, at the cost of a few
outliers (HQQ, Badri and Shaji 2023). `compensated` knows what inputs are like, and moves each error
to weights of the row that are not rounded yet (GPTQ, Frantar et al. 2022, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvspec_kernels.reference import nibbles

GROUP = 64
CODES = 16
# Inputs of whole groups that compensated rounding takes together. Errors move inside of a block
# after each group, and to a later block in one product for all earlier ones.
BLOCK = 8 * GROUP
# Settings of HQQ: exponent of the norm, and weight of the quadratic term with its growth.
NORM, BETA, BETA_GROWTH, STEPS = 0.7, 10.0, 1.01, 20
# Shares of the mean of a moment's diagonal that are added to it, so that it can be inverted: the
# first one that suffices. And the least that is added.
DAMPINGS, LEAST_DAMPING = (0.01, 0.1, 1.0), 1e-6


class Int4Weight(NamedTuple):
    """A weight [N, K]. codes: uint8 [N, K' / 2], where K' is K rounded up to whole groups. scale,
    zero: bf16 [N, K' / GROUP]. num_inputs: K."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    num_inputs: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes


class RoundedGroup(NamedTuple):
    """Up to GROUP inputs of all rows of a weight. codes: uint8 [N, n]. scale, zero: fp32 [N], which
    bf16 holds exactly. errors: fp32 [N, n], each divided by its input's entry on the diagonal of
    the factor."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    errors: torch.Tensor


# Rounding of what compensation has left of a group, fp32 [N, n], by the group's part of the factor,
# fp32 [n, n]. May overwrite the former.
RoundGroup = Callable[[torch.Tensor, torch.Tensor], RoundedGroup]


def empty(num_columns: int, num_inputs: int, device: torch.device) -> Int4Weight:
    """Return a weight [num_columns, num_inputs] for write_rows(), all codes zero."""
    num_groups = -(-num_inputs // GROUP)
    return Int4Weight(
        torch.zeros(num_columns, num_groups * GROUP // 2, dtype=torch.uint8, device=device),
        torch.zeros(num_columns, num_groups, dtype=torch.bfloat16, device=device),
        torch.zeros(num_columns, num_groups, dtype=torch.bfloat16, device=device),
        num_inputs,
    )


def write_rows(weight: Int4Weight, begin: int, rows: Int4Weight) -> None:
    """Replace rows of a weight, from row `begin` on, in place."""
    for part, new in zip(weight[:3], rows[:3], strict=True):
        part[begin : begin + len(new)] = new


def round_to_nearest(weight: torch.Tensor) -> Int4Weight:
    """Encode a weight [N, K] of any floating dtype."""
    groups = _groups(weight)
    scale, zero = _range(groups)
    return _packed(_codes(groups, scale, zero), scale, zero, weight.shape[1])


def half_quadratic(weight: torch.Tensor) -> Int4Weight:
    """Encode a weight [N, K] with zeros that minimise the NORM-norm of the error."""
    groups = _groups(weight)
    scale, zero = _range(groups)
    beta = BETA / scale.clamp_min(torch.finfo(torch.float32).tiny)
    for _ in range(STEPS):
        codes = _codes(groups, scale, zero)
        error = groups - (codes * scale + zero)
        # The part of the error that is taken for outliers.
        size = error.abs().clamp_min(1e-12)
        outliers = error.sign() * (size - (size * beta) ** (NORM - 1) / beta).clamp_min(0)
        zero = (groups - outliers - codes * scale).mean(-1, keepdim=True)
        zero = zero.bfloat16().float()
        beta = beta * BETA_GROWTH
    return _packed(_codes(groups, scale, zero), scale, zero, weight.shape[1])


def compensated(weight: torch.Tensor, moment: torch.Tensor) -> Int4Weight:
    """Encode a weight [N, K] for inputs x with this moment, the sum of x^T x over many inputs, fp32
    [K, K]. Raises torch.linalg.LinAlgError if the moment is not finite."""
    return compensated_by(weight, compensation(moment))


def round_group(left: torch.Tensor, factor: torch.Tensor) -> RoundedGroup:
    """Round inputs one after the other, and move the error of each to later ones of the group.
    Overwrites left."""
    scale, zero = (each[:, 0] for each in _range(_groups(left)))
    codes = torch.empty_like(left, dtype=torch.uint8)
    errors = torch.empty_like(left)
    for column in range(left.shape[1]):
        chosen = _codes(left[:, column, None], scale, zero)
        codes[:, column] = chosen[:, 0]
        error = left[:, column, None] - (chosen * scale + zero)
        errors[:, column] = error[:, 0] / factor[column, column]
        left[:, column + 1 :] -= errors[:, column, None] * factor[column, None, column + 1 :]
    return RoundedGroup(codes, scale[:, 0], zero[:, 0], errors)


def compensated_by(
    weight: torch.Tensor, factor: torch.Tensor, round_group: RoundGroup = round_group
) -> Int4Weight:
    """Encode a weight [N, K], of which each row is rounded by itself. factor: from compensation(),
    fp32 [K, K]. Takes memory for about seven bytes a weight."""
    num_inputs = weight.shape[1]
    # Errors of the weight itself, whatever compensation has added to it before.
    errors = torch.empty_like(weight, dtype=torch.float32)
    groups: list[RoundedGroup] = []
    for begin in range(0, num_inputs, BLOCK):
        inside = slice(begin, min(begin + BLOCK, num_inputs))
        left = weight[:, inside].to(torch.float32, copy=True)
        if begin:
            left.addmm_(errors[:, :begin], factor[:begin, inside])
        block = _compensated_block(left, factor[inside, inside], round_group)
        groups += block
        if inside.stop < num_inputs:
            values = [group.codes * group.scale[:, None] + group.zero[:, None] for group in block]
            torch.sub(weight[:, inside], torch.cat(values, dim=1), out=errors[:, inside])
    del errors
    codes = _filled(torch.cat([group.codes for group in groups], dim=1))
    scale, zero = (
        torch.stack([getattr(group, name) for group in groups], dim=1) for name in ("scale", "zero")
    )
    return _packed(_cut(codes), scale[..., None], zero[..., None], num_inputs)


def _compensated_block(
    left: torch.Tensor, factor: torch.Tensor, round_group: RoundGroup
) -> list[RoundedGroup]:
    """Round the groups of a block one after the other. left: what earlier blocks have left of it,
    fp32 [N, n], which is overwritten. factor: the block's part of the factor, fp32 [n, n]."""
    groups = []
    for begin in range(0, left.shape[1], GROUP):
        end = min(begin + GROUP, left.shape[1])
        group = round_group(left[:, begin:end], factor[begin:end, begin:end])
        if end < left.shape[1]:
            left[:, end:].addmm_(group.errors, factor[begin:end, end:], alpha=-1)
        groups.append(group)
    return groups


def decode(weight: Int4Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] that the codes stand for."""
    codes = _cut(nibbles.unpack(weight.codes).float())
    values = codes * weight.scale.float()[..., None] + weight.zero.float()[..., None]
    rows: torch.Tensor = values.flatten(1)[:, : weight.num_inputs].to(dtype)
    return rows


def product(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., K] times the transposed weight, plus bias [N], in the dtype of x."""
    return F.linear(x, decode(weight, x.dtype), bias)


def compensation(moment: torch.Tensor) -> torch.Tensor:
    """Return how errors of weights move to later inputs, fp32 [K, K], for compensated_by(). Takes
    memory for up to four more of these. Raises torch.linalg.LinAlgError if the moment is not
    finite.

    With the damped moment as U U^T for an upper triangular U, a row's error e costs |e U|^2. Blocks
    on the diagonal are 1 / U of the block: an error inside of it moves as in GPTQ, whose factor is
    1 / U as a whole. Above them stands U[earlier, block] / U[block, block]: the sum of all earlier
    errors times this moves to the block. Both are the same rounding, but the inverse of all of U
    takes three times as long as U.
    """
    upper = _upper_factor(moment)
    inverses = _inverse_blocks(upper)
    for begin, inverse in zip(range(0, len(upper), BLOCK), inverses, strict=True):
        inside = slice(begin, min(begin + BLOCK, len(upper)))
        size = inside.stop - begin
        inverse = inverse[:size, :size]
        if begin:
            upper[:begin, inside] = upper[:begin, inside] @ inverse
        upper[inside, inside] = inverse
    return upper


def _upper_factor(moment: torch.Tensor) -> torch.Tensor:
    """Return an upper triangular matrix whose product with its own transpose is the moment, with
    the least damping that suffices."""
    for damping in DAMPINGS:
        # Wide layers with a few large inputs leave fp32 too few digits for little damping.
        reverse = moment.flip(0, 1)
        reverse.diagonal().add_((damping * moment.diagonal().mean()).clamp_min(LEAST_DAMPING))
        lower, info = torch.linalg.cholesky_ex(reverse)
        # Large layers take a gigabyte a matrix: none is kept longer than it is needed.
        del reverse
        # A value that is not finite makes the diagonal of its row so. One check waits once.
        if (info == 0) & lower.diagonal().isfinite().all():
            upper: torch.Tensor = lower.flip(0, 1).contiguous()
            return upper
        del lower
    error = "the moment of a layer's inputs is not finite"
    raise torch.linalg.LinAlgError(error)  # type: ignore[attr-defined]


def _inverse_blocks(upper: torch.Tensor) -> torch.Tensor:
    """Return the inverse of each block on the diagonal, [count, BLOCK, BLOCK]. The last one is
    filled up with ones on its diagonal."""
    identity = torch.eye(BLOCK, device=upper.device)
    blocks = identity.repeat(-(-len(upper) // BLOCK), 1, 1)
    for place, block in enumerate(blocks):
        part = upper[place * BLOCK :, place * BLOCK :][:BLOCK, :BLOCK]
        block[: len(part), : len(part)] = part
    inverses: torch.Tensor = torch.linalg.solve_triangular(blocks, identity, upper=True)
    return inverses


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """Return fp32 groups [N, K' / GROUP, GROUP]. The last input is repeated to fill the last group,
    so that it does not change the group's range."""
    return _cut(_filled(weight).float())


def _filled(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [N, K] as [N, K'], with the last input repeated."""
    missing = -rows.shape[1] % GROUP
    return torch.cat((rows, rows[:, -1:].expand(-1, missing)), dim=1)


def _cut(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [N, K'] as groups [N, K' / GROUP, GROUP]."""
    return rows.view(len(rows), -1, GROUP)


def _range(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero of each group, rounded to bf16, as fp32 [N, K' / GROUP, 1]."""
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scale = ((most - least) / (CODES - 1)).bfloat16().float()
    return scale, least.bfloat16().float()


def _codes(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    # A zero scale means that every weight of the group equals its zero.
    step = torch.where(scale > 0, scale, 1.0)
    return ((groups - zero) / step).round().clamp(0, CODES - 1)


def _packed(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, num_inputs: int
) -> Int4Weight:
    packed = nibbles.pack(codes.to(torch.uint8).flatten(1))
    return Int4Weight(packed, scale[..., 0].bfloat16(), zero[..., 0].bfloat16(), num_inputs)
