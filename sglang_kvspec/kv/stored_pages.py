"""Pages as prefix tiers store them: anchors as they are, and residuals in slots of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.residual_forms import ResidualForm

# Pages copied at once. This bounds the memory of a copy, besides pools and tiers.
BATCH_PAGES = 16


class StoredPages(NamedTuple):
    """Bytes of pages on the CPU, uint8. anchors: contiguous [N, num_layers, num_kv_heads,
    anchor_bytes]. residuals: contiguous [N, slot_bytes], in a ResidualForm."""

    anchors: torch.Tensor
    residuals: torch.Tensor

    @classmethod
    def empty(cls, kv: PagedKVCache, form: ResidualForm, num_pages: int) -> StoredPages:
        """Return uninitialised bytes, which the device of the KV cache can read without blocking
        the CPU."""
        geometry, is_pinned = kv.geometry, kv.records.is_on_gpu
        shape = (num_pages, geometry.num_layers, geometry.num_kv_heads, kv.codec.anchor_bytes)
        return cls(
            torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned),
            torch.empty((num_pages, form.slot_bytes), dtype=torch.uint8, pin_memory=is_pinned),
        )

    def first(self, num_pages: int) -> StoredPages:
        """Return the first pages, sharing memory."""
        return StoredPages(self.anchors[:num_pages], self.residuals[:num_pages])


def write_stored(
    kv: PagedKVCache,
    form: ResidualForm,
    pages: Sequence[int],
    stored: StoredPages,
    kept_slots: Mapping[int, int],
) -> None:
    """Fill free pages with stored ones. The caller must not change these afterwards. Residuals
    enter the cache while it has room; on a GPU with a store they enter the store only.

    kept_slots: by i, the slot of kept anchors that pages[i] gets instead of stored.anchors[i].
    """
    kv.begin_landing(pages)
    if kept_slots:
        missing = [i for i in range(len(pages)) if i not in kept_slots]
        kv.records.write_anchors([pages[i] for i in missing], stored.anchors[missing])
        kv.records.restore_anchors(list(kept_slots.values()), [pages[i] for i in kept_slots])
    else:
        kv.records.write_anchors(pages, stored.anchors)
    form.write_slots(kv.records, pages, stored.residuals)
    kv.finish_encode(pages)
