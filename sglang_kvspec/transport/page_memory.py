"""Registered memory: pages of encoded KV in one buffer a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.frames import Stream

if TYPE_CHECKING:
    import torch


class PageMemory:
    """Views of chunks in tensors that stay where they are. tensors[stream][chunk] is [num_pages,
    ...] uint8 on the host, pinned or not, contiguous: RecordPool.layer() is one. is_current says
    whether a page still is of a generation.
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
        """A Destination of a receiver; on the sender's side, what to offer."""
        if not self._is_current(page, generation):
            return None
        memory, size = self._views[stream][chunk]
        if not 0 <= page < len(memory) // size:
            raise TransportError(f"page {page} of {len(memory) // size}")
        return memory[page * size : (page + 1) * size]


def _rows(tensor: torch.Tensor) -> tuple[memoryview, int]:
    # Late: a prefix server starts without torch.
    import torch

    if tensor.dtype != torch.uint8 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TransportError(
            f"registered memory must be contiguous uint8 on the host, got {tensor.dtype} on "
            f"{tensor.device}, strides {tensor.stride()}"
        )
    return tensor.view(-1).numpy().data, tensor[0].numel()
