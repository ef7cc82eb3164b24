"""Products by SGLang's Marlin kernel, on weights whose codes are those of an Int4Weight."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvspec_kernels.reference import nibbles
from kvspec_kernels.reference.int4_weights import GROUP, Int4Weight

# Types that Marlin is compiled for: with one zero for all groups, and with integer zeros.
TYPES = ("uint4b8", "uint4")
SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True)
class MarlinWeight:
    """A weight in Marlin's order. value: fp32 [N, K], what the codes stand for."""

    type_name: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    workspace: torch.Tensor
    value: torch.Tensor

    def call(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a product with a copy of the weight."""
        from sglang.kernels.ops.quantization.gptq_marlin import gptq_marlin_gemm
        from sglang.srt.layers.quantization.marlin_utils import scalar_types

        num_columns, num_inputs = self.value.shape
        zeros = None if self.zeros is None else self.zeros.clone()
        return partial(
            gptq_marlin_gemm,
            a=x,
            c=None,
            b_q_weight=self.codes.clone(),
            b_scales=self.scales.clone(),
            global_scale=None,
            b_zeros=zeros,
            g_idx=None,
            perm=None,
            workspace=self.workspace,
            b_q_type=getattr(scalar_types, self.type_name),
            size_m=len(x),
            size_n=num_columns,
            size_k=num_inputs,
            is_k_full=True,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
        )


def marlin_weight(weight: Int4Weight, type_name: str) -> MarlinWeight:
    """Return codes and scales of a weight for Marlin, with integer zeros instead of its own."""
    from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack
    from sglang.srt.layers.quantization import marlin_utils

    device = weight.codes.device
    codes = nibbles.unpack(weight.codes).to(torch.int32)
    num_columns, num_inputs = codes.shape
    num_groups = num_inputs // GROUP
    if type_name == "uint4":
        draw = torch.Generator(device).manual_seed(1)
        size = (num_groups, num_columns)
        integers = torch.randint(5, 11, size, generator=draw, device=device, dtype=torch.int32)
        zeros: Any = marlin_utils.marlin_zero_points(
            integers.cpu(), size_k=num_groups, size_n=num_columns, num_bits=4
        ).to(device)
    else:
        integers = torch.full((num_groups, num_columns), SYMMETRIC_ZERO, device=device)
        zeros = None
    # The order of GPTQ: 8 inputs of a column in a word.
    by_word = codes.t().reshape(num_inputs // 8, 8, num_columns)
    words = by_word[:, 0].clone()
    for nibble in range(1, 8):
        words |= by_word[:, nibble] << 4 * nibble
    packed = gptq_marlin_repack(
        words.contiguous(),
        torch.empty(0, dtype=torch.int32, device=device),
        num_inputs,
        num_columns,
        4,
    )
    scale = weight.scale.t().contiguous()
    scales = marlin_utils.marlin_permute_scales(scale, num_inputs, num_columns, GROUP)
    zero_of_input = integers.t().repeat_interleave(GROUP, 1)
    value = (codes - zero_of_input).float() * weight.scale.float().repeat_interleave(GROUP, 1)
    workspace = marlin_utils.marlin_make_workspace(device)
    return MarlinWeight(type_name, packed, scales, zeros, workspace, value)


def first_use_seconds(weight: Int4Weight) -> float:
    """Return the seconds of a first product, with repacking, which compile both kernels."""
    begin = time.perf_counter()
    x = torch.ones(1, weight.num_inputs, dtype=torch.bfloat16, device=weight.codes.device)
    marlin_weight(weight, TYPES[0]).call(x)()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
