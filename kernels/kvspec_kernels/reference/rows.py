"""Pages by head, and back, for codecs that store codes token after token."""

from __future__ import annotations

import torch


def by_head(pages: torch.Tensor) -> torch.Tensor:
    """Return pages [N, P, H, D] as new contiguous values [N, H, P, D] fp32."""
    return pages.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def to_pages(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values [N, H, P, D] fp32 as new pages [N, P, H, D] `dtype`, clamped to its finite
    range."""
    limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-limit, limit).transpose(1, 2).to(dtype).contiguous()
