"""Byte records of encoded pages, one per page, layer and KV head."""

from __future__ import annotations

import weakref

import torch

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.units import GIB

# Flags of cudaHostRegister: pinned for every context, and in the address space of kernels.
PORTABLE, MAPPED = 1, 2
WORD_BYTES = 8


class RecordPool:
    """Fixed-size records, [num_slots, num_kv_heads, record_bytes] uint8 in each layer.

    Holds anchors (slot = page), kept anchors, the residual cache, and, in host memory, the residual
    store. All lie in one run of memory: layer behind layer, or by_page, where all layers of a slot
    follow each other, so that one copy moves them. A layer is then a view with strides.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        record_bytes: int,
        device: torch.device,
        *,
        pinned: bool = False,
        by_page: bool = False,
    ) -> None:
        """pinned: pin the host memory, so that a GPU can copy from and to it directly; only with
        by_page. Raises ConfigError if the operating system does not allow that."""
        assert by_page or not pinned, "only a pool by page can be pinned"
        first = (num_slots, num_layers) if by_page else (num_layers, num_slots)
        memory = torch.empty((*first, num_kv_heads, record_bytes), dtype=torch.uint8, device=device)
        if pinned:
            _pin(self, memory)
        self._is_by_page = by_page
        # [num_slots, num_layers, num_kv_heads, record_bytes].
        self._by_slot = memory if by_page else memory.transpose(0, 1)
        self._layers = list(self._by_slot.unbind(1))

    @property
    def nbytes(self) -> int:
        return self._by_slot.nbytes

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def page_shape(self) -> torch.Size:
        """Shape of all layers of a slot: (num_layers, num_kv_heads, record_bytes)."""
        return torch.Size((self.num_layers, *self._layers[0].shape[1:]))

    def layer(self, layer: int) -> torch.Tensor:
        """Return all records of a layer: [num_slots, num_kv_heads, record_bytes] uint8."""
        return self._layers[layer]

    def page(self, slot: int) -> torch.Tensor:
        """Return all layers of a slot of a pool by page: contiguous [num_layers, num_kv_heads,
        record_bytes]."""
        return self.pages[slot]

    @property
    def by_slot(self) -> torch.Tensor:
        """All records, [num_slots, num_layers, num_kv_heads, record_bytes]: a view, contiguous in a
        pool by page only."""
        return self._by_slot

    @property
    def pages(self) -> torch.Tensor:
        """All slots of a pool by page: contiguous [num_slots, num_layers, num_kv_heads,
        record_bytes]."""
        assert self._is_by_page, "the pool must be by page"
        return self._by_slot

    def write(self, layer: int, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Store records [N, num_kv_heads, record_bytes] at slots [N] of a layer."""
        _copy_rows(self._layers[layer], slots, records)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of the records at slots [N] of a layer: [N, num_kv_heads, record_bytes]."""
        return _read_rows(self._layers[layer], slots)

    def write_pages(self, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Store records [N, num_layers, num_kv_heads, record_bytes] at slots [N]."""
        _copy_rows(self._by_slot, slots, records)

    def read_pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of all layers of slots [N]: contiguous [N, num_layers, num_kv_heads,
        record_bytes]."""
        return _read_rows(self._by_slot, slots)


def _read_rows(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if _has_words(rows):
        return rows.view(torch.int64).index_select(0, slots).view(torch.uint8)
    return rows.index_select(0, slots)


def _copy_rows(rows: torch.Tensor, slots: torch.Tensor, records: torch.Tensor) -> None:
    if _has_words(rows) and _has_words(records):
        rows, records = rows.view(torch.int64), records.view(torch.int64)
    rows.index_copy_(0, slots, records)


def _has_words(records: torch.Tensor) -> bool:
    """Return True if records can be copied as numbers of 8 bytes. Indexed copies go number by
    number, so these take less time than bytes."""
    starts = (records.shape[-1], records.storage_offset(), *records.stride()[:-1])
    return records.stride(-1) == 1 and not any(start % WORD_BYTES for start in starts)


def _pin(owner: RecordPool, memory: torch.Tensor) -> None:
    """Pin memory for as long as its owner lives. Torch's own pinned memory would be rounded up to
    a power of two."""
    if not memory.nbytes:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE | MAPPED))
    if status:
        raise ConfigError(
            f"pinning {memory.nbytes / GIB:.1f} GiB of host memory failed with CUDA error "
            f"{status}: lower --kvspec-host-gb, or raise the limit on locked memory (ulimit -l)"
        )
    unpin = weakref.finalize(owner, _unpin, memory.data_ptr())
    # A process that ends frees its memory anyway.
    unpin.atexit = False


def _unpin(address: int) -> None:
    # Python prints what a finalizer raises.
    status = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    if status:
        raise RuntimeError(f"unpinning host memory failed with CUDA error {status}")
