"""Attention of a captured verification over VerifyRows, at the target precision."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvspec_kernels.ops.attention import Tail
from kvspec_kernels.ops.ordered_attention import ordered_attention
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.runtime.exact_attention import ExactAttention
from sglang_kvspec.runtime.ordered_attention import DeterministicAttention, past_of
from sglang_kvspec.runtime.record_attention import planned_target, target_workspace_nbytes
from sglang_kvspec.runtime.refined_attention import Int8TargetAttention
from sglang_kvspec.runtime.verify_rows import VerifyRows, filled
from sglang_kvspec.runtime.verify_sizes import VerifySize

# For FlashInfer's plans of graphs, of which one is in use at a time: some thousand numbers.
PLAN_BYTES = 2**21


class CapturedTarget(Protocol):
    """Attends from up to size.num_tokens tokens of up to num_parts parts of rows."""

    num_parts: int

    def plan(self, rows: TargetRows) -> None:
        """A verification begins, with which VerifyRows is loaded; not part of a graph."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        """q [num_tokens, num_qo_heads, head_dim] over the past and, causally, `tail`: like q, and 0
        for tokens of no part. What a graph holds."""


class RefinedVerification:
    """The int8 target: our kernel over anchors and corrections."""

    def __init__(
        self,
        kv: GpuKVCache,
        num_qo_heads: int,
        rows: VerifyRows,
        size: VerifySize,
        workspace: torch.Tensor | None,
    ) -> None:
        """workspace: of another with this max_qo_len, if there is one; neither may run beside the
        other."""
        self._kv, self.num_parts = kv, rows.max_parts
        if workspace is None:
            nbytes = target_workspace_nbytes(kv, num_qo_heads, self.num_parts, size.max_qo_len)
            workspace = torch.zeros(nbytes, dtype=torch.uint8, device=kv.device)
        self.workspace = workspace
        self._attention = planned_target(
            kv,
            num_qo_heads,
            workspace,
            rows.qo_indptr,
            rows.past_indptr,
            rows.past_pages,
            rows.past_last,
            size.max_qo_len,
            num_likely=min(-(-size.num_tokens // size.max_qo_len), self.num_parts),
        )

    def plan(self, rows: TargetRows) -> None:
        """The kernel reads all it needs from VerifyRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        kv = self._kv
        anchors, residuals = kv.anchors.layer(layer), kv.residuals.cache_layer(layer)
        return self._attention.run(q, anchors, residuals, kv.residual_slots, tail)[0]


class OrderedVerification:
    """The exact target in one order of arithmetic."""

    def __init__(self, kv: GpuKVCache, rows: VerifyRows, size: VerifySize) -> None:
        self._kv, self._rows, self._size = kv, rows, size
        self.num_parts = rows.max_parts

    def plan(self, rows: TargetRows) -> None:
        """The kernel reads all it needs from VerifyRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        rows = self._rows
        past = past_of(self._kv, layer, rows.past_indptr, rows.past_pages)
        # It writes the rows of tokens that there are.
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        return ordered_attention(q, past, tail, rows.qo_indptr, self._size.max_qo_len, out)


class PlanBuffers:
    """What FlashInfer's wrappers of graphs that are never replayed at once share."""

    def __init__(self, target: ExactAttention, max_parts: int, max_pages: int) -> None:
        """max_pages: of all parts together."""
        device = target.kv.device

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._target = target
        self._qo_indptr, self._indptr = ints(max_parts + 1), ints(max_parts + 1)
        self._indices, self._last = ints(max_pages), ints(max_parts)
        self._plans = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=device)

    def make_wrapper(self, layout: str, num_parts: int) -> Any:
        wrapper = self._target.make_wrapper(
            layout,
            use_cuda_graph=True,
            qo_indptr_buf=self._qo_indptr[: num_parts + 1],
            paged_kv_indptr_buf=self._indptr[: num_parts + 1],
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=self._last[:num_parts],
        )
        wrapper.reset_workspace_buffer(self._target.workspace, self._plans)
        return wrapper


class ExactVerification:
    """The exact target: FlashInfer over past and tail, as ExactAttention without graphs."""

    def __init__(
        self,
        target: ExactAttention,
        rows: VerifyRows,
        size: VerifySize,
        past: PlanBuffers,
        tail: PlanBuffers,
    ) -> None:
        """Shares the workspace of `target`, so neither may run beside the other."""
        self._target = target
        self.num_parts = target.num_captured_parts(size, rows.max_rows)
        self._past = past.make_wrapper("HND", self.num_parts)
        self._tail = tail.make_wrapper("NHD", self.num_parts)
        device = target.kv.device
        self._index = torch.arange(size.num_tokens, device=device)
        self._qo_indptr = rows.qo_indptr
        # The first plan fixes what launches are made for.
        full = torch.arange(self.num_parts + 1, dtype=torch.int32)
        full[-1] = size.num_tokens
        nothing = torch.zeros(self.num_parts + 1, dtype=torch.int32)
        self._plan(full, nothing, nothing[:0], nothing, nothing[:0], nothing[1:])

    def plan(self, rows: TargetRows) -> None:
        def ends(values: torch.Tensor) -> torch.Tensor:
            return filled(values, self.num_parts + 1, int(values[-1]))

        size = self._target.kv.geometry.page_size
        last = rows.tail_lens - (rows.tail_indptr.diff() - 1) * size
        self._plan(
            ends(rows.qo_indptr),
            ends(rows.past_indptr),
            rows.past_pages,
            ends(rows.tail_indptr),
            rows.tail_slots,
            filled(last.int(), self.num_parts, 0),
        )

    def _plan(
        self,
        qo_indptr: torch.Tensor,
        past_indptr: torch.Tensor,
        past_pages: torch.Tensor,
        tail_indptr: torch.Tensor,
        tail_slots: torch.Tensor,
        tail_last: torch.Tensor,
    ) -> None:
        target = self._target
        target.plan_past(self._past, qo_indptr, past_indptr, past_pages)
        target.plan_tail(self._tail, qo_indptr, tail_indptr, tail_slots, tail_last)

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        target = self._target
        past = self._past.run(q, target.kv.exact_pages(layer), return_lse=True)
        recent = self._tail.run(q, (tail.window_k, tail.window_v), return_lse=True)
        merged = target.merge(past, recent)
        # FlashInfer writes the rows of tokens that there are.
        is_token = self._index < self._qo_indptr[-1]
        return torch.where(is_token[:, None, None], merged, 0)


class Verifications:
    """Makes the attention of captured verifications over one VerifyRows, none of which may be
    replayed beside another."""

    def __init__(
        self,
        kv: GpuKVCache,
        num_qo_heads: int,
        target: ExactAttention | DeterministicAttention | Int8TargetAttention,
        rows: VerifyRows,
    ) -> None:
        self._kv, self._num_qo_heads, self._target, self._rows = kv, num_qo_heads, target, rows
        # Of the int8 kernel by max_qo_len: where the counters of one end, the scratch of another
        # begins, and the kernel relies on finding its counters as it left them.
        self._workspaces: dict[int, torch.Tensor] = {}
        self._buffers: list[PlanBuffers] = []
        if isinstance(target, ExactAttention):
            pages = (len(rows.past_pages), len(rows.tail_slots))
            self._buffers = [PlanBuffers(target, rows.max_parts, count) for count in pages]

    def has_room(self, size: VerifySize) -> bool:
        """Whether a verification of this size can be captured."""
        target = self._target
        if not isinstance(target, ExactAttention):
            return True
        num_parts = target.num_captured_parts(size, self._rows.max_rows)
        return target.captured_bytes(size, num_parts) <= len(target.workspace)

    def make(self, size: VerifySize) -> CapturedTarget:
        target = self._target
        if isinstance(target, ExactAttention):
            return ExactVerification(target, self._rows, size, *self._buffers)
        if isinstance(target, DeterministicAttention):
            return OrderedVerification(self._kv, self._rows, size)
        workspace = self._workspaces.get(size.max_qo_len)
        made = RefinedVerification(self._kv, self._num_qo_heads, self._rows, size, workspace)
        self._workspaces[size.max_qo_len] = made.workspace
        return made
