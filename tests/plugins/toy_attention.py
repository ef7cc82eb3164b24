"""A target attention of another package: the exact target in plain torch, one request at a time.

The parts that are captured elsewhere read indices on the CPU, which a CUDA graph cannot hold. They
run only where nothing is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvspec_kernels.ops.attention import Tail
from sglang_kvspec.core.config import Target
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.target_attention import KV
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize


class PlainTorchAttention:
    """TargetAttention that computes an fp32 softmax over past and tail together."""

    target: ClassVar[Target] = "exact"
    is_deterministic: ClassVar[bool] = False
    splits_by_page: ClassVar[bool] = False
    short_steps_differ: ClassVar[bool] = False
    query_tiles: ClassVar[tuple[int, ...]] = (64,)
    rows_of_a_pass: ClassVar[int | None] = None

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        self._kv = kv
        self._rows: TargetRows | None = None

    def plan(self, rows: TargetRows) -> None:
        self._rows = rows

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor:
        rows = self._rows
        assert rows is not None
        index = Tail(*tail, rows.tail_indptr, rows.tail_slots, rows.tail_lens)
        past = (rows.past_indptr, rows.past_pages)
        return attend(self._kv, layer, q, rows.qo_indptr, past, index)

    def step(self, rows: DraftRows, batch: int) -> PlainTorchStep:
        return PlainTorchStep(self._kv, rows, batch)

    def short_step(self, rows: DraftRows, batch: int) -> PlainTorchStep:
        return self.step(rows, batch)

    def verifications(self, rows: VerifyRows) -> PlainTorchVerifications:
        return PlainTorchVerifications(self._kv, rows)


class PlainTorchStep:
    def __init__(self, kv: GpuKVCache, rows: DraftRows, batch: int) -> None:
        self._kv, self._rows, self._every = kv, rows, torch.arange(batch + 1)

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """Do nothing: every run reads DraftRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        past = (self._rows.past_indptr, self._rows.past_pages)
        return attend(self._kv, layer, q, self._every, past, tail)


class PlainTorchVerifications:
    """Verifications of any size. The object is also the plan of each size, as nothing depends on
    it."""

    def __init__(self, kv: GpuKVCache, rows: VerifyRows) -> None:
        self._kv, self._rows = kv, rows
        self.num_parts = rows.max_parts

    def has_room(self, size: VerifySize) -> bool:
        return True

    def make(self, size: VerifySize) -> PlainTorchVerifications:
        return self

    def plan(self, rows: TargetRows) -> None:
        """Do nothing: every run reads VerifyRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        past = (self._rows.past_indptr, self._rows.past_pages)
        return attend(self._kv, layer, q, self._rows.qo_indptr, past, tail)


def attend(
    kv: GpuKVCache,
    layer: int,
    q: torch.Tensor,
    qo_indptr: torch.Tensor,
    past: tuple[torch.Tensor, torch.Tensor],
    tail: Tail,
) -> torch.Tensor:
    """Attend from q [num_tokens, num_qo_heads, head_dim]. past: indptr and page ids. Return a
    tensor like q, 0 for tokens of no request."""
    out = torch.zeros_like(q)
    for i in range(len(qo_indptr) - 1):
        span = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
        num_seen = int(tail.lens[i])
        if span.start == span.stop or num_seen == 0:
            continue
        pages = past[1][past[0][i] : past[0][i + 1]].long()
        records = kv.residual_slots[pages].long()
        slots = tail.indices[tail.indptr[i] : tail.indptr[i + 1]].long()
        group = q.shape[1] // tail.window_k.shape[2]
        k, v = (
            torch.cat(
                (old[records].transpose(1, 2).flatten(0, 1), window[slots].flatten(0, 1)[:num_seen])
            )
            .float()
            .repeat_interleave(group, dim=1)
            for old, window in zip(
                kv.exact_pages(layer), (tail.window_k, tail.window_v), strict=True
            )
        )
        scores = torch.einsum("qhd,khd->hqk", q[span].float(), k) * q.shape[-1] ** -0.5
        newest = torch.arange(len(k) - scores.shape[1], len(k))
        scores = scores.masked_fill(torch.arange(len(k)) > newest[:, None], -torch.inf)
        out[span] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out
