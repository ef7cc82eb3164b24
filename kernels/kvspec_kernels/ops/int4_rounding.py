"""Rounding of a group of weights to 4 bits in one launch, for int4_weights.compensated_by()."""

from __future__ import annotations

import torch
import triton

from kvspec_kernels.jit.int4_rounding import round_group_kernel
from kvspec_kernels.ops.triton_attention import INTERPRETED
from kvspec_kernels.reference.int4_weights import GROUP, RoundedGroup

# Few, so that a weight of 4096 rows has a program for each multiprocessor.
ROWS = 16


def round_group(left: torch.Tensor, factor: torch.Tensor) -> RoundedGroup:
    """Round a group as int4_weights.round_group() does, up to the rounding of sums.

    left: fp32 [N, n], n up to GROUP. factor: fp32 [n, n], of which the upper triangle is read. The
    last dimension of both is contiguous. Allocates the result, and does not wait for the device.
    Raises ValueError for other dtypes and shapes.
    """
    num_rows, num_inputs = left.shape
    if left.dtype != torch.float32 or factor.dtype != torch.float32:
        raise ValueError(f"left is {left.dtype} and factor {factor.dtype}, and both must be fp32")
    if not 0 < num_inputs <= GROUP or factor.shape != (num_inputs, num_inputs):
        raise ValueError(
            f"left {list(left.shape)} and factor {list(factor.shape)} are not a group of up to "
            f"{GROUP} inputs"
        )
    if left.stride(1) != 1 or factor.stride(1) != 1:
        raise ValueError("the last dimension of left and factor must be contiguous")
    codes = left.new_empty(num_rows, num_inputs, dtype=torch.uint8)
    errors = left.new_empty(num_rows, num_inputs)
    scale, zero = left.new_empty(num_rows), left.new_empty(num_rows)
    if num_rows:
        round_group_kernel[(triton.cdiv(num_rows, ROWS),)](
            left_ptr=left,
            factor_ptr=factor,
            codes_ptr=codes,
            scale_ptr=scale,
            zero_ptr=zero,
            errors_ptr=errors,
            num_rows=num_rows,
            num_inputs=num_inputs,
            stride_left=left.stride(0),
            stride_factor=factor.stride(0),
            ROWS=ROWS,
            INTERPRET=INTERPRETED,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return RoundedGroup(codes, scale, zero, errors)
