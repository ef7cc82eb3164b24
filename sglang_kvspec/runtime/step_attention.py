"""Attention of one captured step over DraftRows: on anchors for drafts, or at target precision.

The recent window is attended to alike by all of them, from indices that the step itself advances
on the device. What else they attend to does not change within a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from kvspec_kernels.ops.attention import DraftAttention, Tail, VerifyAttention, workspace_nbytes
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import indptr
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.exact_attention import ExactAttention
from sglang_kvspec.runtime.record_attention import (
    heads_of,
    planned_target,
    target_workspace_nbytes,
)

# Requests, or parts of one, that one call of the int8 kernel attends for.
REFINED_BATCH = 64


class StepAttention(Protocol):
    """What the first `batch` rows of a DraftRows attend to, one query token each."""

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """A round begins over these rows, at most `batch`; not part of a graph."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        """q [batch, num_qo_heads, head_dim] over the past and `tail`: like q. What a graph holds:
        it neither allocates anything that outlives it nor waits."""


class AnchorStep:
    """Drafts: past pages are read from their anchors."""

    def __init__(
        self, kv: GpuKVCache, num_qo_heads: int, rows: DraftRows, batch: int, *, past: bool = True
    ) -> None:
        """past: whether there is any; without it only the tail is attended to."""
        self._kv = kv
        heads = heads_of(kv, num_qo_heads)
        common: dict[str, Any] = {
            "settings": kv.codec.settings,
            "q_dtype": kv.geometry.dtype,
        }
        # The CUDA kernel shares out pages of the past, of which there are none.
        backend: Literal["auto", "triton"] = "auto" if past else "triton"
        nbytes = workspace_nbytes(
            batch_size=batch,
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            page_size=heads[3],
            device=kv.device,
            backend=backend,
            **common,
        )
        workspace = torch.zeros(nbytes, dtype=torch.uint8, device=kv.device)
        self.attention = DraftAttention(workspace, backend)
        begins = rows.past_indptr[: batch + 1]
        self.attention.plan(
            begins if past else torch.zeros_like(begins),
            rows.past_pages,
            rows.past_last[:batch],
            *heads,
            **common,
        )

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """The kernel reads all it needs from DraftRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        return self.attention.run(q, self._kv.anchors.layer(layer), tail)[0]


class ExactStep:
    """FlashInfer over the exact residuals of past pages; our draft kernel over the tail."""

    def __init__(
        self, target: ExactAttention, num_qo_heads: int, rows: DraftRows, batch: int
    ) -> None:
        """Shares the workspace of `target`, so neither may run beside the other."""
        kv = target.kv
        self._target, self._batch = target, batch
        self._tail = AnchorStep(kv, num_qo_heads, rows, batch, past=False).attention
        self._every = torch.arange(batch + 1, dtype=torch.int32)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=kv.device)

        self._past: Any = target.make_wrapper(
            "HND",
            use_cuda_graph=True,
            qo_indptr_buf=ints(batch + 1),
            paged_kv_indptr_buf=ints(batch + 1),
            paged_kv_indices_buf=ints(len(rows.past_pages)),
            paged_kv_last_page_len_buf=ints(batch),
        )

    def plan(self, rows: Sequence[DraftRow]) -> None:
        begins = indptr([*(len(row.past) for row in rows), *([0] * (self._batch - len(rows)))])
        pages = torch.cat([torch.empty(0, dtype=torch.int64), *(row.past for row in rows)])
        self._target.plan_past(self._past, self._every, begins, pages)

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        # Neither fills the device on its own where requests are few.
        with self._target.beside:
            recent = self._tail.run(q, self._target.kv.anchors.layer(layer), tail)
        past = self._past.run(q, self._target.kv.exact_pages(layer), return_lse=True)
        self._target.beside.join()
        return self._target.merge(past, recent)


class RecordStep:
    """VerifyAttention over records, one token a request: the int8 target, and the exact one where
    contexts are so short that starting three kernels takes longer than reading them."""

    def __init__(self, kv: GpuKVCache, num_qo_heads: int, rows: DraftRows, batch: int) -> None:
        self._kv, self._rows = kv, rows
        self._parts: list[tuple[slice, VerifyAttention]] = []
        # Parts run one after the other. Where the counters of one size end, the scratch of another
        # begins, so only parts of one size share a workspace.
        workspaces: dict[int, torch.Tensor] = {}
        for first in range(0, batch, REFINED_BATCH):
            part = slice(first, min(first + REFINED_BATCH, batch))
            self._parts.append((part, self._planned(part, num_qo_heads, workspaces)))

    def _planned(
        self, part: slice, num_qo_heads: int, workspaces: dict[int, torch.Tensor]
    ) -> VerifyAttention:
        kv, rows = self._kv, self._rows
        count = part.stop - part.start
        if count not in workspaces:
            nbytes = target_workspace_nbytes(kv, num_qo_heads, count, max_qo_len=1)
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
        )

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """The kernel reads all it needs from DraftRows."""

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
