"""The exact target on a GPU: FlashInfer over the raw bits that are the exact residual."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.runtime.target_rows import TargetRows, sent_to

WORKSPACE_BYTES = 384 * 2**20


class ExactAttention:
    """Past pages are read where they lie in the residual cache: exact records are FlashInfer's HND
    layout with strides of their own. The tail is a second state, and both are merged."""

    def __init__(self, kv: DeviceKV, num_qo_heads: int) -> None:
        # Late: FlashInfer asks for a GPU when it is imported.
        import flashinfer

        self._flashinfer = flashinfer
        self._kv = kv
        geometry = kv.geometry
        self._heads = (
            *(num_qo_heads, geometry.num_kv_heads),
            *(geometry.head_dim, geometry.page_size),
        )
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=kv.device)
        make = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        # fa2 splits long contexts over multiprocessors, which verifying a few tokens needs; fa3
        # does not, and is faster where there are many tokens.
        self._past: Any = make(workspace, "HND", backend="fa2")
        self._tail: Any = make(workspace, "NHD", backend="fa2")
        self._has_past = False

    def plan(self, rows: TargetRows) -> None:
        size = self._kv.geometry.page_size
        settings: dict[str, Any] = {
            "q_data_type": self._kv.geometry.dtype,
            "kv_data_type": self._kv.geometry.dtype,
        }
        self._has_past = len(rows.past_pages) > 0
        if self._has_past:
            num_pages = rows.past_indptr.diff()
            self._past.plan(
                rows.qo_indptr,
                rows.past_indptr,
                self._kv.residual_slots.index_select(0, sent_to(self._kv.device, rows.past_pages)),
                torch.where(num_pages > 0, size, 0).int(),
                *self._heads,
                causal=False,
                **settings,
            )
        last = rows.tail_lens - (rows.tail_indptr.diff() - 1) * size
        self._tail.plan(
            rows.qo_indptr,
            rows.tail_indptr,
            rows.tail_slots,
            last.int(),
            *self._heads,
            causal=True,
            **settings,
        )

    def run(self, layer: int, q: torch.Tensor, tail: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """q [num_tokens, heads, head_dim] over past and `tail`: (k, v), each [slots, page_size,
        num_kv_heads, head_dim]."""
        if not self._has_past:
            return self._tail.run(q, tail)  # type: ignore[no-any-return]
        past = self._past.run(q, self.past_pages(layer), return_lse=True)
        recent = self._tail.run(q, tail, return_lse=True)
        return self._flashinfer.merge_state(*past, *recent)[0]  # type: ignore[no-any-return]

    def past_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all residual slots, in place: each [slots, num_kv_heads, page_size, head_dim]
        of the model's KV dtype."""
        geometry = self._kv.geometry
        records = self._kv.residuals.cache_layer(layer).view(geometry.dtype)
        shape = (*records.shape[:2], 2, geometry.page_size, geometry.head_dim)
        k, v = records[..., : 2 * geometry.page_size * geometry.head_dim].view(shape).unbind(2)
        return k, v
