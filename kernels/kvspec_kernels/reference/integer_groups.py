"""Asymmetric integer codes of groups of values: code 0 is the smallest value, and the top code the
largest. A value is code * scale + zero, and scale and zero are bf16."""

from __future__ import annotations

import torch

from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference import bit_packing


def scale_and_zero(groups: torch.Tensor, dim: int, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero as stored, bf16 values in fp32, of groups of fp32 values along `dim`,
    which is reduced to 1. top: the largest code. A group of equal values has scale 0."""
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    limit = torch.finfo(torch.bfloat16).max
    # amin may return 0.0 or -0.0; + 0.0 turns both into 0.0.
    zero = low.clamp(-limit, limit).bfloat16().float() + 0.0
    # Divide before subtracting: the range of values near the dtype's maximum overflows. Divide by a
    # tensor: by a number, torch on a GPU multiplies with its rounded reciprocal.
    steps = torch.full_like(low, top)
    scale = (high / steps - zero / steps).clamp_min(0)
    return scale.bfloat16().float() + 0.0, zero


def codes(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, top: int) -> torch.Tensor:
    """Return the nearest codes 0..top of fp32 values, as int32. scale, zero: as stored. Values that
    are not numbers have code 0."""
    step = torch.where(scale > 0, scale, 1.0)
    return ((groups - zero) / step).round().clamp(0, top).nan_to_num(0.0).to(torch.int32)


def write(
    anchors: torch.Tensor,
    layout: RecordLayout,
    part: str,
    groups: torch.Tensor,
    dim: int,
    anchor_bits: int,
) -> None:
    """Write scales, zeros and packed codes of a part, k or v, into anchor records [N, H, nbytes].
    groups: values [N, H, P, D] in fp32, viewed so that groups lie along `dim`."""
    top = (1 << anchor_bits) - 1
    scale, zero = scale_and_zero(groups, dim, top)
    packed = layout[f"{part}_codes"].view(anchors)
    # Not -1 for the head size: without pages nothing tells it.
    head_dim = packed.shape[-1] * 8 // anchor_bits
    by_token = codes(groups, scale, zero, top).reshape(*packed.shape[:3], head_dim)
    packed.copy_(bit_packing.pack(by_token, anchor_bits))
    layout[f"{part}_scale"].view(anchors).copy_(scale.squeeze(dim))
    layout[f"{part}_zero"].view(anchors).copy_(zero.squeeze(dim))


def read_codes(
    anchors: torch.Tensor, layout: RecordLayout, part: str, anchor_bits: int
) -> torch.Tensor:
    """Return new codes [N, H, P, D] of a part in fp32."""
    return bit_packing.unpack(layout[f"{part}_codes"].view(anchors), anchor_bits).float()


def restore(
    groups: torch.Tensor, anchors: torch.Tensor, layout: RecordLayout, part: str, dim: int
) -> torch.Tensor:
    """Turn codes into values in place, and return them. groups: as for write()."""
    scale, zero = (
        layout[f"{part}_{field}"].view(anchors).float().unsqueeze(dim)
        for field in ("scale", "zero")
    )
    return groups.mul_(scale).add_(zero)
