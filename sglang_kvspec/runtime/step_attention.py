"""Attention of one captured step over DraftRows, and the draft step over anchors.

Every step attends to the recent window by indices that the step itself advances on the device.
Nothing else that a step attends to changes within a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvspec_kernels.ops.attention import DraftAttention, Tail, workspace_nbytes
from kvspec_kernels.ops.attention_plan import Backend
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.record_attention import heads_of


class StepAttention(Protocol):
    """Attention of the first `batch` rows of a DraftRows, one or a few query tokens each."""

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """Prepare the replays of a round over these rows, at most `batch`. A graph does not hold
        this call."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        """Attend from q [batch * num_rows, num_qo_heads, head_dim] to the past and to `tail`.
        num_rows: query tokens of each row, the tail's last tokens.

        Returns a tensor like q. A graph holds this call: memory that outlives the graph is not
        allocated, and the device is not waited for.
        """


class AnchorStep:
    """StepAttention of drafts, which reads past pages from their anchors."""

    def __init__(
        self,
        kv: GpuKVCache,
        num_qo_heads: int,
        rows: DraftRows,
        batch: int,
        *,
        past: bool = True,
        num_rows: int = 1,
    ) -> None:
        """past: False attends to the tail only. num_rows: query tokens of each row. Layers share
        one plan, or have a plan each over rows.head_pages."""
        self._kv = kv
        heads = heads_of(kv, num_qo_heads)
        common: dict[str, Any] = {
            "settings": kv.codec.settings,
            "q_dtype": kv.geometry.dtype,
            "has_past": past,
        }
        head_pages = rows.head_pages if past else None
        backend: Backend = kv.kernels if past else "triton"
        nbytes = workspace_nbytes(
            batch_size=batch,
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            page_size=heads[3],
            device=kv.device,
            backend=backend,
            max_qo_len=num_rows,
            has_lists_by_head=head_pages is not None,
            **common,
        )
        workspace = torch.zeros(nbytes, dtype=torch.uint8, device=kv.device)
        indptr = rows.past_indptr if head_pages is None else rows.list_indptr
        begins = indptr[: batch + 1]

        def planned(pages: torch.Tensor) -> DraftAttention:
            attention = DraftAttention(workspace, backend)
            attention.plan(
                begins if past else torch.zeros_like(begins),
                pages,
                rows.past_last[:batch],
                *heads,
                num_rows=num_rows,
                **common,
            )
            return attention

        layers = kv.geometry.num_layers
        if head_pages is None:
            self.by_layer = [planned(rows.past_pages)] * layers
        else:
            self.by_layer = [planned(head_pages[:, layer]) for layer in range(layers)]

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """Do nothing: the kernel reads all it needs from DraftRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        return self.by_layer[layer].run(q, self._kv.anchors.layer(layer), tail)[0]
