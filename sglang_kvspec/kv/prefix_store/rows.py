"""Memory of torch tensors as the plain buffers that files and sockets take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def page_rows(pages: Sequence[torch.Tensor] | torch.Tensor) -> list[memoryview]:
    """Return the bytes of each of these pages, uint8 on the CPU, pinned or not, sharing its memory.
    Raises ValueError if a page is not contiguous."""
    # Late import: a prefix server starts without torch.
    import torch

    rows: list[memoryview] = []
    for page in pages:
        if page.device.type != "cpu" or page.dtype != torch.uint8:
            raise ValueError(f"pages must be uint8 on the CPU, got {page.dtype} on {page.device}")
        if not page.is_contiguous():
            raise ValueError(f"each page must be contiguous, got strides {page.stride()}")
        rows.append(page.reshape(-1).numpy().data)
    return rows
