"""Attention of a captured step over records, in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvspec_kernels.ops.attention import Tail, VerifyAttention
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.record_attention import (
    PARTS_OF_A_CALL,
    planned_target,
    target_workspace_nbytes,
)


class RecordStep:
    """StepAttention of VerifyAttention, one token a request, over records of the codec's target.

    The `int8` target always uses this step. The `exact` target uses it for contexts so short that
    starting three kernels takes longer than reading the records.
    """

    def __init__(
        self,
        kv: GpuKVCache,
        num_qo_heads: int,
        rows: DraftRows,
        batch: int,
        *,
        is_deterministic: bool = False,
    ) -> None:
        """is_deterministic: bits of a row do not depend on the others. Its tail is one page."""
        self._kv, self._rows, self._is_deterministic = kv, rows, is_deterministic
        self._parts: list[tuple[slice, VerifyAttention]] = []
        # Parts run one after the other. Where the counters of one size end, the scratch of another
        # begins, so only parts of one size share a workspace.
        workspaces: dict[int, torch.Tensor] = {}
        for first in range(0, batch, PARTS_OF_A_CALL):
            part = slice(first, min(first + PARTS_OF_A_CALL, batch))
            self._parts.append((part, self._planned(part, num_qo_heads, workspaces)))

    def _planned(
        self, part: slice, num_qo_heads: int, workspaces: dict[int, torch.Tensor]
    ) -> VerifyAttention:
        kv, rows = self._kv, self._rows
        count = part.stop - part.start
        most = None
        if self._is_deterministic:
            most = len(rows.past_pages) // rows.max_batch * count + count
        if count not in workspaces:
            nbytes = target_workspace_nbytes(kv, num_qo_heads, count, 1, most)
            workspaces[count] = torch.zeros(nbytes, dtype=torch.uint8, device=kv.device)
        return planned_target(
            kv,
            num_qo_heads,
            workspaces[count],
            torch.arange(count + 1, dtype=torch.int32, device=kv.device),
            rows.past_indptr[part.start : part.stop + 1],
            rows.past_pages,
            rows.past_last[part],
            max_qo_len=1,
            deterministic_pages=most,
        )

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """Do nothing: the kernel reads all it needs from DraftRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        kv = self._kv
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part, attention in self._parts:
            attention.run(
                q[part],
                kv.anchors.layer(layer),
                kv.residuals.cache_layer(layer),
                kv.residual_slots,
                tail._replace(indptr=tail.indptr[part.start : part.stop + 1], lens=tail.lens[part]),
                out=out[part],
            )
        return out
