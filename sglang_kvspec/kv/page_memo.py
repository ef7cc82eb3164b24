"""Memo of pages computed from bytes, which computes again only where the bytes changed.

The memo serves the int8 target on the CPU reference backend, where decoding costs more than the
attention itself. Every read compares the present bytes with the bytes of the last computation. So a
stale or foreign residual shows as it would without a memo.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_kvspec.kv.decoded_anchors import LIMIT_BYTES
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.memo_slots import MemoSlots

KV = tuple[torch.Tensor, torch.Tensor]


class PageMemo:
    """Memo with slots for the keys that were read most recently, in limit_bytes: per layer, the
    bytes last seen, and their result.

    content_bytes: number of a page's bytes, all layers. Memory is touched only as it is filled.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_keys: int,
        content_bytes: int,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._slots = MemoSlots(
            num_keys, limit_bytes // (content_bytes + geometry.plain_page_bytes)
        )
        num_slots = self._slots.num_slots
        shape = (num_slots, *geometry.page_shape)
        layers = range(geometry.num_layers)
        self._results: list[KV] = [
            (torch.empty(shape, dtype=geometry.dtype), torch.empty(shape, dtype=geometry.dtype))
            for _ in layers
        ]
        self._contents: list[tuple[torch.Tensor, ...]] = [() for _ in layers]
        self._filled = torch.zeros((geometry.num_layers, num_slots), dtype=torch.bool)

    def read(
        self,
        layer: int,
        keys: torch.Tensor,
        contents: tuple[torch.Tensor, ...],
        compute: Callable[..., KV],
    ) -> KV:
        """Return compute(*contents): (k, v), each [N, page_size, num_kv_heads, head_dim].

        contents[i]: [N, ...], the present contents of distinct keys [N]; shapes and dtypes never
        change. compute must treat pages independently. It is called for all pages of a read that
        has more keys than there are slots.
        """
        placed = self._slots.place(keys)
        if placed is None:
            return compute(*contents)
        slots, changed = placed
        self._filled[:, changed] = False
        if not self._contents[layer]:
            self._contents[layer] = tuple(
                part.new_empty((self._slots.num_slots, *part.shape[1:])) for part in contents
            )
        known = self._filled[layer, slots]
        for kept, now in zip(self._contents[layer], contents, strict=True):
            known &= _same(kept.index_select(0, slots), now)
        if not bool(known.all()):
            stale = slots[~known]
            fresh = tuple(part[~known] for part in contents)
            for kept, now in zip(self._contents[layer], fresh, strict=True):
                kept[stale] = now
            for kept, result in zip(self._results[layer], compute(*fresh), strict=True):
                kept[stale] = result
            self._filled[layer, stale] = True
        k, v = self._results[layer]
        return k.index_select(0, slots), v.index_select(0, slots)


def _same(kept: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return the bitwise equality of pages [N, ...] of one shape: [N] bool."""
    left, right = (part.contiguous().flatten(1).view(torch.uint8) for part in (kept, now))
    if left.shape[1] % 8 == 0:
        # Compare 8 bytes at a time: reducing single bytes costs more than comparing them.
        left, right = left.view(torch.int64), right.view(torch.int64)
    return ~(left != right).any(1)
