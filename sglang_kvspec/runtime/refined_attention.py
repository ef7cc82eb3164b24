"""The int8 target on a GPU: our kernel over anchors and corrections."""

from __future__ import annotations

import torch

from kvspec_kernels.ops.attention import Tail, VerifyAttention
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.kv.transfers import fields_to_device, to_device
from sglang_kvspec.runtime.record_attention import planned_target, target_workspace_nbytes
from sglang_kvspec.runtime.step_attention import REFINED_BATCH

KV = tuple[torch.Tensor, torch.Tensor]


class Int8TargetAttention:
    """VerifyAttention over anchors and corrections, in batches."""

    # Query rows that a block of the kernel handles at once, columns of 8.
    query_tiles = (16, 32, 64, 128)

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        geometry = kv.geometry
        if geometry.page_size != REFINED_BATCH:
            raise UnsupportedError(
                f"--kvspec-target int8 on a GPU needs --page-size 64, got {geometry.page_size}"
            )
        self._kv, self._num_qo_heads = kv, num_qo_heads
        # One for full batches and one for the rest: where the counters of one size end, the scratch
        # of another begins, and the kernel relies on finding its counters as it left them.
        self._workspaces = [torch.zeros(0, dtype=torch.uint8, device=kv.device) for _ in range(2)]
        self._batches: list[tuple[slice, VerifyAttention, tuple[torch.Tensor, ...]]] = []

    def plan(self, rows: TargetRows) -> None:
        self._batches = []
        num_rows = len(rows.tail_lens)
        device = self._kv.device
        names = ("past_pages", "tail_slots", "tail_lens", "tail_indptr", "past_indptr")
        on_device = fields_to_device(device, rows, names)
        for first in range(0, num_rows, REFINED_BATCH):
            stop = min(first + REFINED_BATCH, num_rows)
            begin = int(rows.qo_indptr[first])
            end = int(rows.qo_indptr[stop])
            qo_indptr = to_device(device, rows.qo_indptr[first : stop + 1] - begin)
            attention = self._planned(qo_indptr, on_device, slice(first, stop), rows.max_qo_len)
            tail = (
                on_device["tail_indptr"][first : stop + 1],
                on_device["tail_slots"],
                on_device["tail_lens"][first:stop],
            )
            self._batches.append((slice(begin, end), attention, tail))

    def _planned(
        self,
        qo_indptr: torch.Tensor,
        index: dict[str, torch.Tensor],
        part: slice,
        max_qo_len: int,
    ) -> VerifyAttention:
        kv, count = self._kv, part.stop - part.start
        nbytes = target_workspace_nbytes(kv, self._num_qo_heads, count, max_qo_len)
        which = int(count < REFINED_BATCH)
        if len(self._workspaces[which]) < nbytes:
            self._workspaces[which] = torch.zeros(nbytes, dtype=torch.uint8, device=kv.device)
        page_size = kv.geometry.page_size
        return planned_target(
            kv,
            self._num_qo_heads,
            self._workspaces[which],
            qo_indptr,
            index["past_indptr"][part.start : part.stop + 1],
            index["past_pages"],
            torch.full((count,), page_size, dtype=torch.int32, device=kv.device),
            max_qo_len,
            is_captured=False,
        )

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor:
        kv = self._kv
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for span, attention, index in self._batches:
            attention.run(
                q[span],
                kv.anchors.layer(layer),
                kv.residuals.cache_layer(layer),
                kv.residual_slots,
                Tail(*tail, *index),
                out=out[span],
                lse=lse[span],
            )
        return out
