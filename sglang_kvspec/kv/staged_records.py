"""Copies of records between pools on a GPU and the CPU, through a buffer on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sglang_kvspec.kv.copy_streams import CopyStream
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.transfers import sent_together

# Size of the buffer, unless the records of a single page are larger.
BUFFER_BYTES = 64 * 2**20


def buffer_bytes(page_bytes: int) -> int:
    """Return the GPU memory that copies take. page_bytes: of a page's anchors or residuals."""
    return max(BUFFER_BYTES, page_bytes)


class StagedRecords:
    """RecordCopies of pools on a GPU. A page's records lie apart, layer by layer. One kernel per
    layer gathers the records of many pages in the buffer, or scatters them from there. One copy
    moves the buffer over the link.

    All of this is work of one stream. It runs after the work that the stream was given before,
    which may still write these pages, and before later work. The buffer is made at first use.
    """

    def __init__(self, device: torch.device, stream: CopyStream) -> None:
        self._device, self._stream = device, stream
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def read(self, pool: RecordPool, slots: Sequence[int]) -> torch.Tensor:
        """Return records of these slots, [N, num_layers, num_kv_heads, record_bytes] on the CPU,
        pinned if the device is a GPU. Block the CPU until they are there."""
        is_pinned = bool(slots) and self._device.type == "cuda"
        records = torch.empty(
            (len(slots), *pool.page_shape), dtype=torch.uint8, pin_memory=is_pinned
        )
        for part, buffer, rows, places in self._parts(pool, slots):
            for layer in range(pool.num_layers):
                self._stream.copy_rows(buffer[:, layer], places, pool.layer(layer), rows)
            self._stream.copy([(records[part], buffer)])
        self._stream.mark().synchronize()
        return records

    def write(self, pool: RecordPool, slots: Sequence[int], records: torch.Tensor) -> None:
        """Store such records at distinct slots. The caller must not change them afterwards. Does
        not wait for the device."""
        if slots and self._device.type == "cuda":
            # A copy from pageable memory would block the CPU until all work before it is done.
            records = records.contiguous().pin_memory()
        for part, buffer, rows, places in self._parts(pool, slots):
            self._stream.copy([(buffer, records[part])])
            for layer in range(pool.num_layers):
                self._stream.copy_rows(pool.layer(layer), rows, buffer[:, layer], places)

    def copy(
        self,
        source: RecordPool,
        source_slots: Sequence[int],
        target: RecordPool,
        target_slots: Sequence[int],
    ) -> None:
        """Copy records from slots of one pool to distinct slots of another, without the buffer.
        Does not wait for the device."""
        assert len(source_slots) == len(target_slots), (source_slots, target_slots)
        if not source_slots:
            return
        rows_from, rows_to = sent_together(
            self._device,
            [torch.tensor(list(s), dtype=torch.int32) for s in (source_slots, target_slots)],
        )
        for layer in range(source.num_layers):
            self._stream.copy_rows(target.layer(layer), rows_to, source.layer(layer), rows_from)

    def _parts(
        self, pool: RecordPool, slots: Sequence[int]
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the slots in parts that fit into the buffer. A part is the slice of slots, their
        room in the buffer, and the rows of pool and buffer."""
        page_bytes = pool.page_shape.numel()
        room = buffer_bytes(page_bytes)
        if slots and len(self._buffer) < room:
            self._buffer = torch.empty(room, dtype=torch.uint8, device=self._device)
        step = room // page_bytes
        for first in range(0, len(slots), step):
            part = slice(first, min(first + step, len(slots)))
            count = part.stop - first
            buffer = self._buffer[: count * page_bytes].view(count, *pool.page_shape)
            rows, places = sent_together(
                self._device,
                [torch.tensor(ids, dtype=torch.int32) for ids in (list(slots[part]), range(count))],
            )
            yield part, buffer, rows, places
