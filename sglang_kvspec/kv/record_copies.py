"""Copies of encoded pages' records between the CPU and a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_kvspec.kv.record_pool import RecordPool


class RecordCopies(Protocol):
    """Copies that run in order with the other work of the pool's device."""

    def read(self, pool: RecordPool, slots: Sequence[int]) -> torch.Tensor:
        """Return records of these slots, [N, num_layers, num_kv_heads, record_bytes] uint8 on the
        CPU. Block the CPU until they are there."""

    def write(self, pool: RecordPool, slots: Sequence[int], records: torch.Tensor) -> None:
        """Store such records at distinct slots. The caller must not change them afterwards."""

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
