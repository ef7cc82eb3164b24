"""Target `exact` on a GPU: FlashInfer over the raw bits in exact residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kvspec_kernels.jit.nvrtc import is_hopper
from kvspec_kernels.ops.attention import DraftAttention, Tail
from sglang_kvspec.core.config import Target
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows, indptr
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.side_stream import SideStream
from sglang_kvspec.runtime.step_attention import AnchorStep
from sglang_kvspec.runtime.target_attention import KV
from sglang_kvspec.runtime.targets.flashinfer_pages import TILES, FlashInferPages
from sglang_kvspec.runtime.targets.record_step import RecordStep
from sglang_kvspec.runtime.verify_rows import VerifyRows, filled
from sglang_kvspec.runtime.verify_sizes import VerifySize

# Query tokens of a request from which on FA3 is faster, on Hopper. FA3 multiplies faster, but does
# not split contexts over multiprocessors, which few tokens need.
MANY_QUERIES = 128

# Bytes of FlashInfer's plan for a graph: some thousand numbers. One plan is in use at a time.
PLAN_BYTES = 2**21


class ExactTargetAttention:
    """TargetAttention that reads past pages in place from the residual cache. The tail is a second
    attention, and both results are merged."""

    target: ClassVar[Target] = "exact"
    is_deterministic: ClassVar[bool] = False
    splits_by_page: ClassVar[bool] = False
    # Starting three kernels takes longer than reading a short context.
    short_steps_differ: ClassVar[bool] = True
    query_tiles: ClassVar[tuple[int, ...]] = TILES[:-1]
    rows_of_a_pass: ClassVar[int | None] = None

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        self._kv, self._num_qo_heads = kv, num_qo_heads
        pages = self._pages = FlashInferPages(kv, num_qo_heads)
        # Stream for the tail of a step.
        self._side = SideStream(kv.device)
        self._few = (pages.make_wrapper("HND"), pages.make_wrapper("NHD"))
        # FlashInfer has FA3 for Hopper only.
        backend = "fa3" if is_hopper(kv.device) else "fa2"
        self._many = (pages.make_wrapper("HND", backend), pages.make_ragged_wrapper(backend))
        self._past, self._tail = self._few
        self._has_past = self._many_queries = False

    def plan(self, rows: TargetRows) -> None:
        pages, size = self._pages, self._kv.geometry.page_size
        self._many_queries = rows.max_qo_len >= MANY_QUERIES and rows.begins_pages
        self._past, self._tail = self._many if self._many_queries else self._few
        self._has_past = len(rows.past_pages) > 0
        if self._has_past:
            pages.plan_past(self._past, rows.qo_indptr, rows.past_indptr, rows.past_pages)
        if self._many_queries:
            pages.plan_ragged(self._tail, rows.qo_indptr)
            return
        last = rows.tail_lens - (rows.tail_indptr.diff() - 1) * size
        pages.plan_tail(self._tail, rows.qo_indptr, rows.tail_indptr, rows.tail_slots, last.int())

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor:
        recent_kv = new if self._many_queries else (tail,)
        if not self._has_past:
            return self._tail.run(q, *recent_kv)  # type: ignore[no-any-return]
        past = self._past.run(q, self._kv.exact_pages(layer), return_lse=True)
        recent = self._tail.run(q, *recent_kv, return_lse=True)
        return self._pages.merge(past, recent)

    def step(self, rows: DraftRows, batch: int) -> ExactStep:
        tail = AnchorStep(self._kv, self._num_qo_heads, rows, batch, past=False).by_layer[0]
        return ExactStep(self._pages, tail, self._side, rows, batch)

    def short_step(self, rows: DraftRows, batch: int) -> RecordStep:
        return RecordStep(self._kv, self._num_qo_heads, rows, batch)

    def verifications(self, rows: VerifyRows) -> ExactVerifications:
        return ExactVerifications(self._pages, rows)


class ExactStep:
    """StepAttention that reads exact residuals of past pages by FlashInfer, and the tail by
    KVSpec's draft kernel."""

    def __init__(
        self,
        pages: FlashInferPages,
        tail: DraftAttention,
        side: SideStream,
        rows: DraftRows,
        batch: int,
    ) -> None:
        """tail: planned over the tails of the first `batch` rows. side: stream that the tail runs
        on."""
        self._pages, self._tail, self._side, self._batch = pages, tail, side, batch
        self._every = torch.arange(batch + 1, dtype=torch.int32)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=pages.kv.device)

        self._past: Any = pages.make_wrapper(
            "HND",
            use_cuda_graph=True,
            qo_indptr_buf=ints(batch + 1),
            paged_kv_indptr_buf=ints(batch + 1),
            paged_kv_indices_buf=ints(len(rows.past_pages)),
            paged_kv_last_page_len_buf=ints(batch),
        )

    def plan(self, rows: Sequence[DraftRow]) -> None:
        begins = indptr([*(len(row.past) for row in rows), *([0] * (self._batch - len(rows)))])
        past = torch.cat([torch.empty(0, dtype=torch.int64), *(row.past for row in rows)])
        self._pages.plan_past(self._past, self._every, begins, past)

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        kv = self._pages.kv
        # Neither attention alone fills the device if requests are few.
        with self._side:
            recent = self._tail.run(q, kv.anchors.layer(layer), tail)
        past = self._past.run(q, kv.exact_pages(layer), return_lse=True)
        self._side.join()
        return self._pages.merge(past, recent)


class PlanBuffers:
    """Buffers that the FlashInfer wrappers of all graphs share. No two wrappers run at once."""

    def __init__(self, pages: FlashInferPages, max_parts: int, max_pages: int) -> None:
        """max_pages: most pages of all parts together."""
        device = pages.kv.device

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._pages = pages
        self._qo_indptr, self._indptr = ints(max_parts + 1), ints(max_parts + 1)
        self._indices, self._last = ints(max_pages), ints(max_parts)
        self._plans = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=device)

    def make_wrapper(self, layout: str, num_parts: int) -> Any:
        """Make a wrapper of num_parts parts of rows that reads these buffers."""
        wrapper = self._pages.make_wrapper(
            layout,
            use_cuda_graph=True,
            qo_indptr_buf=self._qo_indptr[: num_parts + 1],
            paged_kv_indptr_buf=self._indptr[: num_parts + 1],
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=self._last[:num_parts],
        )
        wrapper.reset_workspace_buffer(self._pages.workspace, self._plans)
        return wrapper


class ExactVerification:
    """CapturedTarget of FlashInfer over past and tail."""

    def __init__(
        self,
        pages: FlashInferPages,
        rows: VerifyRows,
        size: VerifySize,
        past: PlanBuffers,
        tail: PlanBuffers,
    ) -> None:
        """past, tail: plan buffers of the attention over past pages, and of that over the tail."""
        self._pages = pages
        self.num_parts = pages.num_captured_parts(size, rows.max_rows)
        self._past = past.make_wrapper("HND", self.num_parts)
        self._tail = tail.make_wrapper("NHD", self.num_parts)
        self._index = torch.arange(size.num_tokens, device=pages.kv.device)
        self._qo_indptr = rows.qo_indptr
        # The first plan fixes the sizes of the captured launches.
        full = torch.arange(self.num_parts + 1, dtype=torch.int32)
        full[-1] = size.num_tokens
        nothing = torch.zeros(self.num_parts + 1, dtype=torch.int32)
        self._plan(full, nothing, nothing[:0], nothing, nothing[:0], nothing[1:])

    def plan(self, rows: TargetRows) -> None:
        def ends(values: torch.Tensor) -> torch.Tensor:
            return filled(values, self.num_parts + 1, int(values[-1]))

        size = self._pages.kv.geometry.page_size
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
        pages = self._pages
        pages.plan_past(self._past, qo_indptr, past_indptr, past_pages)
        pages.plan_tail(self._tail, qo_indptr, tail_indptr, tail_slots, tail_last)

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        pages = self._pages
        past = self._past.run(q, pages.kv.exact_pages(layer), return_lse=True)
        recent = self._tail.run(q, (tail.window_k, tail.window_v), return_lse=True)
        merged = pages.merge(past, recent)
        # FlashInfer writes only the rows of tokens that exist.
        is_token = self._index < self._qo_indptr[-1]
        return torch.where(is_token[:, None, None], merged, 0)


class ExactVerifications:
    """TargetVerifications of FlashInfer, on the same workspace as eager forwards."""

    def __init__(self, pages: FlashInferPages, rows: VerifyRows) -> None:
        self._pages, self._rows = pages, rows
        past, tail = len(rows.past_pages), len(rows.tail_slots)
        self._past = PlanBuffers(pages, rows.max_parts, past)
        self._tail = PlanBuffers(pages, rows.max_parts, tail)

    def has_room(self, size: VerifySize) -> bool:
        num_parts = self._pages.num_captured_parts(size, self._rows.max_rows)
        return self._pages.has_room(size, num_parts)

    def make(self, size: VerifySize) -> ExactVerification:
        return ExactVerification(self._pages, self._rows, size, self._past, self._tail)
