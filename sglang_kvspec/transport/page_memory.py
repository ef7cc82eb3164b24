"""Registered memory: pages of encoded KV in tensors, one for each stream and chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.frames import Stream

if TYPE_CHECKING:
    import torch


class PageMemory:
    """Views of chunks in tensors that do not move.

    tensors: tensors[stream][chunk] is [num_pages, ...] uint8, contiguous, on the host, pinned or
    not: RecordPool.layer() is one. is_current: returns True if a page still has a generation.
    """

    def __init__(
        self,
        tensors: Sequence[Sequence[torch.Tensor]],
        is_current: Callable[[int, int], bool],
    ) -> None:
        self._is_current = is_current
        self._views = [[_rows(tensor) for tensor in stream] for stream in tensors]

    def chunk_bytes(self, stream: Stream) -> int:
        return self._views[stream][0][1]

    def view(self, stream: Stream, page: int, generation: int, chunk: int) -> memoryview | None:
        """Return a chunk to receive into, or to offer; None if the page has another generation."""
        if not self._is_current(page, generation):
            return None
        memory, size = self._views[stream][chunk]
        if not 0 <= page < len(memory) // size:
            raise TransportError(f"page {page} is outside the {len(memory) // size} pages")
        return memory[page * size : (page + 1) * size]


def _rows(tensor: torch.Tensor) -> tuple[memoryview, int]:
    # Imported late, because a prefix server starts without torch.
    import torch

    if tensor.dtype != torch.uint8 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TransportError(
            f"registered memory must be contiguous uint8 on the host, got {tensor.dtype} on "
            f"{tensor.device}, strides {tensor.stride()}"
        )
    return tensor.view(-1).numpy().data, tensor[0].numel()
