"""Byte records of encoded pages, one per page, layer and KV head."""

from __future__ import annotations

import weakref

import torch

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.units import GIB

# Flags of cudaHostRegister: pinned for every context, and in the address space of kernels.
PORTABLE, MAPPED = 1, 2


class RecordPool:
    """Fixed-size records in one tensor a layer: [num_slots, num_kv_heads, record_bytes] uint8.

    Holds anchors (slot = page), kept anchors, the residual cache, and, in host memory, the residual
    store. by_page: all layers of a slot lie in one run of memory, so that one copy moves them. A
    layer is then a view with strides.
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
        self._pages: torch.Tensor | None = None
        if by_page:
            shape = (num_slots, num_layers, num_kv_heads, record_bytes)
            self._pages = torch.empty(shape, dtype=torch.uint8, device=device)
            if pinned:
                _pin(self, self._pages)
            self._layers = list(self._pages.unbind(1))
        else:
            assert not pinned, "only a pool by page can be pinned"
            self._layers = [
                torch.empty(
                    (num_slots, num_kv_heads, record_bytes), dtype=torch.uint8, device=device
                )
                for _ in range(num_layers)
            ]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

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
    def pages(self) -> torch.Tensor:
        """All slots of a pool by page: contiguous [num_slots, num_layers, num_kv_heads,
        record_bytes]."""
        assert self._pages is not None, "the pool must be by page"
        return self._pages

    def write(self, layer: int, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Store records [N, num_kv_heads, record_bytes] at slots [N] of a layer."""
        self._layers[layer].index_copy_(0, slots, records)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of the records at slots [N] of a layer: [N, num_kv_heads, record_bytes]."""
        return self._layers[layer].index_select(0, slots)

    def write_pages(self, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Store records [N, num_layers, num_kv_heads, record_bytes] at slots [N]."""
        if self._pages is not None:
            self._pages.index_copy_(0, slots, records)
            return
        for layer in range(self.num_layers):
            self.write(layer, slots, records[:, layer])

    def read_pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of all layers of slots [N]: contiguous [N, num_layers, num_kv_heads,
        record_bytes]."""
        if self._pages is not None:
            return self._pages.index_select(0, slots)
        return torch.stack([self.read(n, slots) for n in range(self.num_layers)], dim=1)


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
