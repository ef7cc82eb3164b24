"""The references of encoding in one call."""

from __future__ import annotations

import torch

from kvspec_kernels.formats import (
    Log4Settings,
    Target,
    Uniform4Settings,
    anchor_layout,
    residual_layout,
)
from kvspec_kernels.reference import exact, log4, uniform4


def encode_by_reference(
    k: torch.Tensor, v: torch.Tensor, settings: Log4Settings | Uniform4Settings, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages k, v [N, P, H, D] as anchor and residual records [N, H, nbytes] uint8 on the CPU."""
    k, v = k.cpu(), v.cpu()
    _, page_size, _, head_dim = k.shape
    anchor = anchor_layout(settings, page_size, head_dim)
    residual = residual_layout(settings, target, page_size, head_dim, k.dtype)
    corrections = residual if target == "int8" else None
    if isinstance(settings, Log4Settings):
        anchors, residuals = log4.encode(k, v, settings, anchor, corrections)
    else:
        anchors, residuals = uniform4.encode(k, v, settings, anchor, corrections)
    return anchors, exact.encode(k, v, residual) if residuals is None else residuals
