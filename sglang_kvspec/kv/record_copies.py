"""Copies of encoded pages' records between the CPU and a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_kvspec.kv.record_pool import RecordPool


class RecordCopies(Protocol):
    """Copies in the order of the work that the pool's device was given."""

    def read(self, pool: RecordPool, slots: Sequence[int]) -> torch.Tensor:
        """Return records of these slots, [N, num_layers, num_kv_heads, record_bytes] uint8 on the
        CPU, which waits for them."""

    def write(self, pool: RecordPool, slots: Sequence[int], records: torch.Tensor) -> None:
        """Store such records, which are not to change any more, at distinct slots."""

    def copy(
        self,
        source: RecordPool,
        source_slots: Sequence[int],
        target: RecordPool,
        target_slots: Sequence[int],
    ) -> None:
        """Copy records from slots of one pool to distinct slots of another."""


class CpuRecordCopies:
    """RecordCopies of pools in CPU memory."""

    def read(self, pool: RecordPool, slots: Sequence[int]) -> torch.Tensor:
        return pool.read_pages(_index(slots))

    def write(self, pool: RecordPool, slots: Sequence[int], records: torch.Tensor) -> None:
        pool.write_pages(_index(slots), records)

    def copy(
        self,
        source: RecordPool,
        source_slots: Sequence[int],
        target: RecordPool,
        target_slots: Sequence[int],
    ) -> None:
        target.write_pages(_index(target_slots), source.read_pages(_index(source_slots)))


def _index(slots: Sequence[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)
