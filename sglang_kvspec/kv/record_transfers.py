"""Whole pages of a KV cache to and from a lower tier, another server or a retraction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.codecs.packed_residual import PackedResidual
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.packed_pages import PackedPages
from sglang_kvspec.kv.recent_window import RecentWindow
from sglang_kvspec.kv.record_copies import RecordCopies
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_pages import Residuals
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.kv.transfers import to_device
from sglang_kvspec.planning.capacity import CapacityPlan


class Pages(Protocol):
    """The part of a PagedKVCache that transfers use."""

    geometry: KVGeometry
    codec: Codec
    plan: CapacityPlan
    device: torch.device
    anchors: RecordPool
    kept_anchors: RecordPool
    window: RecentWindow
    residuals: Residuals

    def is_encoded(self, page: int) -> bool: ...

    def open_pages(self, pages: Iterable[int]) -> None: ...

    def commit_pages(self, pages: Sequence[int]) -> None: ...


class RecordTransfers:
    """Reads and writes of one KV cache's pages, after all work that the device was given so far.

    Records are [num_pages, num_layers, num_kv_heads, record_bytes] uint8 on the CPU. The caller
    must not change records after it has written them. Pages to write are distinct. Reads block the
    CPU until their data is there.
    """

    def __init__(self, kv: Pages, copies: RecordCopies) -> None:
        self._kv, self._copies = kv, copies

    @property
    def is_on_gpu(self) -> bool:
        return self._kv.device.type == "cuda"

    def warm_up(self) -> None:
        """Copy an empty page, to compile the kernels of copies and to allocate their memory. Call
        before the first request."""
        kv = self._kv
        for pool in [kv.anchors] if kv.plan.host_pages else [kv.anchors, kv.residuals.cache]:
            self._copies.write(pool, [0], self._copies.read(pool, [0]))
        if kv.plan.kept_anchor_pages:
            self._copies.copy(kv.anchors, [0], kv.kept_anchors, [0])
        if kv.codec.packed is not None:
            shape = kv.residuals.cache.page_shape
            raw = torch.zeros(shape, dtype=torch.uint8, device=kv.device)
            anchors = self._anchors_on_device([0])
            done = kv.codec.packed.pack(anchors, raw)
            kv.codec.packed.unpack(anchors, done.records, done.raw_v)

    # Records

    def read_anchors(self, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of the anchors of encoded pages."""
        return self._copies.read(self._kv.anchors, pages)

    def write_anchors(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """Store the anchors of pages that land."""
        self._copies.write(self._kv.anchors, pages, records)

    def read_residuals(self, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of pages' residuals, from the cache or the store."""
        return self._kv.residuals.read_pages(pages)

    def write_residuals(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """Store the residuals of pages that land."""
        self._kv.residuals.write_pages(pages, records)

    def read_packed(self, pages: Sequence[int]) -> PackedPages:
        """Return the residuals of encoded pages in the packed form, beside their anchors."""
        assert all(map(self._kv.is_encoded, pages)), "only an encoded page has anchors"
        if (rows := self._kv.residuals.packed) is not None:
            return rows.read_packed(pages)
        packed, shape = self._packed, (len(pages), *self._kv.residuals.cache.page_shape[:-1])
        done = packed.pack(self._anchors_on_device(pages), self._residuals_on_device(pages))
        return PackedPages(
            done.records.view(*shape, packed.record_bytes).cpu(),
            done.fits.view(shape).cpu(),
            done.raw_v.cpu(),
        )

    def write_packed(self, pages: Sequence[int], packed: torch.Tensor, raw_v: torch.Tensor) -> None:
        """Store packed residuals of pages that land, whose anchors are there. packed, raw_v: as in
        PackedPages, records and raw_v."""
        if not pages:
            return
        kv = self._kv
        if kv.residuals.packed is not None:
            kv.residuals.packed.write_packed(pages, packed, raw_v)
            return
        packed, raw_v = (to_device(kv.device, part) for part in (packed, raw_v))
        raw = self._packed.unpack(self._anchors_on_device(pages), packed.flatten(0, 1), raw_v)
        raw = raw.view(len(pages), *kv.residuals.cache.page_shape)
        if self.is_on_gpu and not kv.plan.host_pages:
            kv.residuals.cache.write_pages(self._cache_slots_of(pages), raw)
        else:
            self.write_residuals(pages, raw.cpu())

    @property
    def _packed(self) -> PackedResidual:
        packed = self._kv.codec.packed
        assert packed is not None, "residuals of this server are not packed"
        return packed

    def _anchors_on_device(self, pages: Sequence[int]) -> torch.Tensor:
        """Return anchors of pages as the codec takes them: [pages and layers, num_kv_heads,
        anchor_bytes]."""
        return self._kv.anchors.read_pages(self._index(pages)).flatten(0, 1)

    def _residuals_on_device(self, pages: Sequence[int]) -> torch.Tensor:
        """Return residuals, like _anchors_on_device()."""
        kv = self._kv
        for state in (ResidualState.ABSENT, ResidualState.IN_FLIGHT):
            missing = kv.residuals.table.pages_in(pages, state)
            assert not missing, f"page {missing[0]} has no residual to read"
        if self.is_on_gpu and not kv.plan.host_pages:
            return kv.residuals.cache.read_pages(self._cache_slots_of(pages)).flatten(0, 1)
        return to_device(kv.device, self.read_residuals(pages)).flatten(0, 1)

    def _cache_slots_of(self, pages: Sequence[int]) -> torch.Tensor:
        return self._index(self._kv.residuals.cache_slots.slots_of(pages))

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(self._kv.device, torch.tensor(numbers, dtype=torch.int64))

    def keep_anchors(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the anchors of encoded pages into slots of `kept_anchors`, where they stay when the
        pages are freed."""
        assert all(map(self._kv.is_encoded, pages)), "only an encoded page has anchors"
        self._copies.copy(self._kv.anchors, pages, self._kv.kept_anchors, slots)

    def restore_anchors(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy anchors from slots of `kept_anchors` to pages that land. The slots may be used again
        at once."""
        self._copies.copy(self._kv.kept_anchors, slots, self._kv.anchors, pages)

    # Full precision

    def read_whole(self, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of encoded pages as the model gave them: new tensors on the device,
        [N, num_layers, page_size, num_kv_heads, head_dim]. Residuals may be in the cache or the
        store. The target must be `exact`."""
        kv = self._kv
        assert kv.codec.target == "exact", (
            "int8 residuals hold corrections, not values: target must be exact"
        )
        records = to_device(kv.device, self.read_residuals(pages))
        k, v = kv.codec.decode_exact(records.flatten(0, 1))
        shape = (len(pages), kv.geometry.num_layers, *k.shape[1:])
        return k.view(shape), v.view(shape)

    def read_plain(self, page: int, num_tokens: int) -> torch.Tensor | None:
        """Return K and V of a page's first tokens as the model gave them: a copy [num_layers, 2,
        num_tokens, num_kv_heads, head_dim] on the CPU. A page outside of the window is read from
        its residual, which must be there. Return None if that loses precision (target `int8`)."""
        kv = self._kv
        if page not in kv.window.slots:
            if kv.codec.target != "exact":
                return None
            k, v = self.read_whole([page])
            return torch.stack((k[0], v[0]), dim=1)[:, :, :num_tokens].cpu()
        slot = kv.window.slots.slot_of(page)
        layers = map(kv.window.layer, range(kv.geometry.num_layers))
        tokens = [torch.stack([part[slot, :num_tokens] for part in layer]) for layer in layers]
        return torch.stack(tokens).cpu()

    def write_plain(self, page: int, tokens: torch.Tensor) -> None:
        """Write the first tokens of a free page, as read_plain() gives them, to the window. Commit
        a page whose tokens are complete. Raises CapacityError when the window is full."""
        kv = self._kv
        kv.open_pages([page])
        slot, num_tokens = kv.window.slots.slot_of(page), tokens.shape[2]
        on_device = to_device(kv.device, tokens)
        for layer in range(kv.geometry.num_layers):
            for part, values in zip(kv.window.layer(layer), on_device[layer], strict=True):
                part[slot, :num_tokens] = values
        if num_tokens == kv.geometry.page_size:
            kv.commit_pages([page])
