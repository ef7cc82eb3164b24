"""Records of one size in numbered slots of a file, with an index file that lists them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sglang_kvspec.kv.prefix_store.disk_file import MAX_BUFFERS, Bytes, StoreFile
from sglang_kvspec.kv.prefix_store.entries import HEADER_BYTES, SEQUENCE, Entry, EntryFormat
from sglang_kvspec.kv.prefix_store.free_slots import neighbour_runs


class Slab:
    """Records and entries of one tier. A record counts from the moment its entry is whole. A slab
    does not check records: a reader must compare them with the checksum in the entry. That makes
    every order of writing safe.
    """

    def __init__(self, data: StoreFile, index: StoreFile, layout: EntryFormat) -> None:
        self._data = data
        self._index = index
        self._layout = layout

    def has_header(self) -> bool:
        found = bytearray(HEADER_BYTES)
        count = self._index.read_into(0, [memoryview(found)])
        return count == HEADER_BYTES and bytes(found) == self._layout.header

    def start_empty(self) -> None:
        self._index.truncate(0)
        self._index.write(0, self._layout.header)

    def shrink_to(self, num_slots: int) -> None:
        """Cut off slots from num_slots on."""
        if self._index.size() > self._layout.offset(num_slots):
            self._index.truncate(self._layout.offset(num_slots))
        if self._data.size() > num_slots * self._layout.record_bytes:
            self._data.truncate(num_slots * self._layout.record_bytes)

    def num_slots(self) -> int:
        """Return the number of slots that have an entry, free or not."""
        return max(0, self._index.size() - HEADER_BYTES) // self._layout.nbytes

    def load_index(self) -> Iterator[tuple[int, Entry | None]]:
        """Read the index. Yield the slots that are not free with their entries, the oldest first.
        None for an entry that was being written when its writer died, or is being written."""
        found = np.zeros((self.num_slots(), self._layout.nbytes), dtype=np.uint8)
        self._index.read_into(HEADER_BYTES, [found.reshape(-1).data])
        written = np.flatnonzero(found.any(axis=1))
        sequences = np.ascontiguousarray(found[written, SEQUENCE]).view("<u8").reshape(-1)
        slots: list[int] = written[np.argsort(sequences, kind="stable")].tolist()
        return ((slot, self._layout.unpack(slot, found[slot].tobytes())) for slot in slots)

    def entry(self, slot: int) -> Entry | None:
        raw = bytearray(self._layout.nbytes)
        self._index.read_into(self._layout.offset(slot), [memoryview(raw)])
        return self._layout.unpack(slot, bytes(raw))

    def write(self, slot: int, entry: Entry, record: Bytes) -> None:
        """Write a record and its entry. Raises OSError; the slot then holds no record."""
        assert len(record) == self._layout.record_bytes
        self._data.write(slot * self._layout.record_bytes, record)
        self._index.write(self._layout.offset(slot), self._layout.pack(slot, entry))

    def clear(self, slot: int) -> None:
        self._index.write(self._layout.offset(slot), self._layout.free)

    def read(self, slots: Sequence[int], rows: Sequence[memoryview]) -> list[OSError | None]:
        """Read the record of slots[i] into rows[i] unchecked, neighbours in one call. A row beyond
        the end of the file is left as it is. Return the error of each row, or None."""
        failures: list[OSError | None] = [None] * len(slots)
        for run in neighbour_runs(slots, MAX_BUFFERS):
            offset = slots[run[0]] * self._layout.record_bytes
            try:
                self._data.read_into(offset, [rows[position] for position in run])
            except OSError as error:
                for position in run:
                    failures[position] = error
        return failures

    def sync(self) -> None:
        self._data.sync()
        self._index.sync()

    def close(self) -> None:
        self._data.close()
        self._index.close()
