"""Triton kernel that rounds a group of 64 inputs to 4 bits, and makes up for errors inside it.

A program takes a few rows, which do not depend on one another. It goes through the inputs of the
group in order. The error of each moves to the later ones, by the group's part of the factor, before
these are rounded. A row of 64 weights stays in registers, so a group takes one launch, where
reference/int4_weights.py takes several a column. Both round alike: launch this kernel with
`enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.arithmetic import MAGIC
from kvspec_kernels.jit.rounding import rounded


@triton.jit
def as_bf16(x, INTERPRET: tl.constexpr):
    """Return fp32 x rounded to bf16, in fp32."""
    return rounded(x, tl.bfloat16, INTERPRET).to(tl.float32)


@triton.jit
def round_group_kernel(
    left_ptr,
    factor_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    errors_ptr,
    num_rows,
    num_inputs,
    stride_left,
    stride_factor,
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Round ROWS rows of left, fp32 [num_rows, num_inputs], with num_inputs from 1 to 64.

    factor: fp32 [num_inputs, num_inputs], upper triangle. codes: uint8, and errors: fp32, both
    [num_rows, num_inputs] without gaps. scale, zero: fp32 [num_rows].
    """
    offs_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, 64)
    mask_rows = offs_n < num_rows
    inside = offs_k < num_inputs
    # Rows past the end read others again, and are not stored.
    rows = left_ptr + (offs_n % num_rows).to(tl.int64) * stride_left
    left = tl.load(rows[:, None] + offs_k[None, :], mask=inside[None, :], other=0.0)

    least = tl.min(tl.where(inside[None, :], left, float("inf")), axis=1)
    most = tl.max(tl.where(inside[None, :], left, float("-inf")), axis=1)
    scale = as_bf16(tl.div_rn(most - least, 15.0), INTERPRET)
    zero = as_bf16(least, INTERPRET)
    # A zero scale means that every weight of the group equals its zero.
    step = tl.where(scale > 0.0, scale, 1.0)

    codes = tl.zeros((ROWS, 64), tl.float32)
    errors = tl.zeros((ROWS, 64), tl.float32)
    for column in range(0, num_inputs):
        is_here = (offs_k == column)[None, :]
        weight = tl.sum(tl.where(is_here, left, 0.0), axis=1)
        place = tl.minimum(tl.maximum(tl.div_rn(weight - zero, step), 0.0), 15.0)
        # Ties to even, as torch rounds.
        code = (place + MAGIC) - MAGIC
        factor_row = factor_ptr + column * stride_factor
        diagonal = tl.load(factor_row + column)
        error = tl.div_rn(weight - (code * scale + zero), diagonal)
        later = (offs_k > column) & inside
        moves = tl.load(factor_row + offs_k, mask=later, other=0.0)
        left = left - error[:, None] * moves[None, :]
        codes = tl.where(is_here, code[:, None], codes)
        errors = tl.where(is_here, error[:, None], errors)

    mask = mask_rows[:, None] & inside[None, :]
    at = offs_n[:, None].to(tl.int64) * num_inputs + offs_k[None, :]
    tl.store(codes_ptr + at, codes.to(tl.uint8), mask=mask)
    tl.store(errors_ptr + at, errors, mask=mask)
    tl.store(scale_ptr + offs_n, scale, mask=mask_rows)
    tl.store(zero_ptr + offs_n, zero, mask=mask_rows)
