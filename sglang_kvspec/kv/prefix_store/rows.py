"""Memory of torch tensors as the plain buffers that files and sockets take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def page_rows(pages: torch.Tensor) -> list[memoryview]:
    """Return the bytes of each page of `pages` [N, num_layers, num_kv_heads, record_bytes] uint8 on
    the CPU, pinned or not, sharing its memory. Raises ValueError if a page is not contiguous."""
    # Late import: a prefix server starts without torch.
    import torch

    if pages.device.type != "cpu" or pages.dtype != torch.uint8:
        raise ValueError(f"pages must be uint8 on the CPU, got {pages.dtype} on {pages.device}")
    if len(pages) and not pages[0].is_contiguous():
        raise ValueError(f"each page must be contiguous, got strides {pages.stride()}")
    return [memoryview(page.reshape(-1).numpy()) for page in pages]
