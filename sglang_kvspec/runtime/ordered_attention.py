"""The exact target in one order of arithmetic: for SGLang's deterministic inference.

Prefill, verification and single steps give the same bits, so that drafting changes no token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvspec_kernels.ops.attention import Tail
from kvspec_kernels.ops.ordered_attention import Past, ordered_attention
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.kv.transfers import fields_to_device
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows

KV = tuple[torch.Tensor, torch.Tensor]


class DeterministicAttention:
    """Of planned forwards, as ExactAttention."""

    # Query rows of a program.
    query_tiles = (64,)

    def __init__(self, kv: GpuKVCache) -> None:
        self._kv = kv
        self._max_qo_len = 1
        self._index: dict[str, torch.Tensor] = {}

    def plan(self, rows: TargetRows) -> None:
        self._max_qo_len = rows.max_qo_len
        names = ("qo_indptr", "past_indptr", "past_pages", "tail_indptr", "tail_slots", "tail_lens")
        self._index = fields_to_device(self._kv.device, rows, names)

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor:
        index = self._index
        return ordered_attention(
            q,
            past_of(self._kv, layer, index["past_indptr"], index["past_pages"]),
            Tail(*tail, index["tail_indptr"], index["tail_slots"], index["tail_lens"]),
            index["qo_indptr"],
            self._max_qo_len,
        )


class OrderedStep:
    """Of one token of each row: a StepAttention."""

    def __init__(self, kv: GpuKVCache, rows: DraftRows, batch: int) -> None:
        self._kv, self._rows, self._batch = kv, rows, batch
        self._every = torch.arange(batch + 1, dtype=torch.int32, device=kv.device)

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """The kernel reads all it needs from DraftRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        begins = self._rows.past_indptr[: self._batch + 1]
        past = past_of(self._kv, layer, begins, self._rows.past_pages)
        return ordered_attention(q, past, tail, self._every, 1)


def past_of(kv: GpuKVCache, layer: int, indptr: torch.Tensor, pages: torch.Tensor) -> Past:
    """Request b's encoded pages[indptr[b] : indptr[b + 1]] where they lie. int32 on the device."""
    return Past(*kv.exact_pages(layer), kv.residual_slots, indptr, pages)
