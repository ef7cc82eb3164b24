"""Rounding of metadata to bf16, to the side on which no value is cut off."""

from __future__ import annotations

import torch

_LARGEST = torch.finfo(torch.bfloat16).max


def bf16_at_least(x: torch.Tensor) -> torch.Tensor:
    """Return, in fp32, the smallest bf16 that is not below each finite fp32 x; the largest bf16
    where there is none."""
    bits = x.clamp(max=_LARGEST).contiguous().view(torch.int32)
    # Cutting off the lower half rounds towards zero, which is up for a negative number.
    carried = torch.where(x > 0, bits + 0xFFFF, bits)
    return (carried & -0x10000).view(torch.float32)


def bf16_at_most(x: torch.Tensor) -> torch.Tensor:
    """Return, in fp32, the largest bf16 that is not above each finite fp32 x; the smallest bf16
    where there is none."""
    return -bf16_at_least(-x)
