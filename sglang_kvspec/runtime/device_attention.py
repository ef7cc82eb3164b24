"""Attention over a DeviceKV: our kernels for drafts and the int8 target, FlashInfer for `exact`."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from kvspec_kernels.ops.append import append
from kvspec_kernels.ops.attention import Tail, VerifyAttention, workspace_nbytes
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.pools.transfers import sent_to
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.exact_attention import ExactAttention
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.runtime.ordered_attention import OrderedAttention, OrderedStep
from sglang_kvspec.runtime.step_attention import (
    REFINED_BATCH,
    AnchorStep,
    ExactStep,
    RecordStep,
    StepAttention,
)
from sglang_kvspec.runtime.target_rows import TargetRows, target_rows

KV = tuple[torch.Tensor, torch.Tensor]


class TargetAttention(Protocol):
    """Attends to encoded past pages at the target precision and to a full-precision tail."""

    def plan(self, rows: TargetRows) -> None: ...

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor: ...


class DeviceAttention:
    """Writes the KV of a planned forward and attends, layer by layer, as ReferenceAttention does.

    begin(plan), forward(layer, ...) once for every layer, finish(). Between begin_steps() and
    end_steps() forward() is one step over DraftRows instead, which a CUDA graph may capture.
    """

    def __init__(self, kv: DeviceKV, num_qo_heads: int, *, in_order: bool = False) -> None:
        """in_order: attend at the target precision, which is then `exact`, in an arithmetic that
        depends neither on chunks and batches nor on what was drafted."""
        self.kv = kv
        self._num_qo_heads = num_qo_heads
        self._target: TargetAttention
        if in_order:
            self._target = OrderedAttention(kv)
        elif kv.codec.target == "exact":
            self._target = ExactAttention(kv, num_qo_heads)
        else:
            self._target = RefinedAttention(kv, num_qo_heads)
        self._plan: ForwardPlan | None = None
        self._rows: TargetRows | None = None
        self._scratch: KV | None = None
        self._index: dict[str, torch.Tensor] = {}
        self._steps: tuple[DraftRows, StepAttention] | None = None

    # Target

    def begin(self, plan: ForwardPlan) -> None:
        """Open the window pages this forward writes to, announce the pages it encodes, and plan."""
        assert self._plan is None, "the previous forward was not finished"
        kv, size = self.kv, self.kv.geometry.page_size
        # Prefill hides what it fetches; a verification's pages come whole, as a rule beforehand.
        kv.require_residuals(
            (page for row in plan.rows for page in row.past_pages(size).tolist()),
            by_layer=any(row.kind is RowKind.PREFILL for row in plan.rows),
        )
        for row in plan.rows:
            written = row.written_pages(size)
            pages = row.pages[written.start : written.stop].tolist()
            placed = list(zip(written, pages, strict=True))
            kv.open_pages(page for i, page in placed if i not in row.direct)
            kv.begin_encode([page for i, page in placed if i in row.direct])
        self._plan = plan
        rows = target_rows(
            plan, size, kv.window.slots.slot_of, split_by_page=kv.codec.target == "int8"
        )
        self._rows = rows
        kv.place_residuals(rows.encode_pages.tolist())
        self._index = {
            name: sent_to(kv.device, getattr(rows, name))
            for name in (
                *("token_slots", "token_offsets", "encode_source", "encode_pages"),
                *("fill_scratch", "fill_window", "keep_scratch", "keep_window"),
            )
        }
        if rows.num_scratch:
            geometry = kv.geometry
            shape = (rows.num_scratch, size, geometry.num_kv_heads, geometry.head_dim)
            k, v = torch.empty((2, *shape), dtype=geometry.dtype, device=kv.device)
            self._scratch = (k, v)
        self._target.plan(rows)

    def finish(self) -> None:
        """All layers ran: pages encoded on the way are complete."""
        assert self._plan is not None
        for row in self._plan.rows:
            self.kv.finish_encode(row.pages[row.direct.start : row.direct.stop].tolist())
        self.kv.end_forward()
        self._plan = self._rows = self._scratch = None
        self._index = {}

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim].

        Stores k and v, returns the attention output, like q and contiguous. Raises
        UnsupportedError for a scale other than 1 / sqrt(head_dim).
        """
        if not math.isclose(scale, self.kv.geometry.head_dim**-0.5, rel_tol=1e-6):
            raise UnsupportedError(
                f"--kvspec on a GPU needs attention scaled by 1/sqrt(head size), got {scale}"
            )
        if self._steps is not None:
            return self._forward_step(layer, q, k, v)
        assert self._rows is not None, "forward() without begin()"
        # Prefill may be padded for a graph or a collective; padding attends to nothing.
        num_tokens = self._rows.num_tokens
        new = (k[:num_tokens], v[:num_tokens])
        tail = self._write(layer, *new)
        self.kv.await_layer(layer)
        out = self._target.run(layer, q[:num_tokens], tail, new)
        if len(q) == num_tokens:
            return out
        return torch.cat((out, out.new_zeros((len(q) - num_tokens, *out.shape[1:]))))

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> KV:
        """Store k, v in the tail pool, which is returned, and encode what this forward encodes."""
        index, window = self._index, self.kv.window.layer(layer)
        pool = self._scratch or window
        for part, from_window in zip(pool, window, strict=True):
            if len(index["fill_scratch"]):
                part[index["fill_scratch"]] = from_window[index["fill_window"]]
        for part, new in zip(pool, (k, v), strict=True):
            part[index["token_slots"], index["token_offsets"]] = new
        for part, to_window in zip(pool, window, strict=True):
            if len(index["keep_scratch"]):
                to_window[index["keep_window"]] = part[index["keep_scratch"]]
        if len(index["encode_source"]):
            self.kv.encode_from(layer, *pool, index["encode_source"], index["encode_pages"])
        return pool

    def warm_up(self, max_draft_len: int) -> None:
        """Run what serving runs once, so that nothing is compiled or loaded for a request. Uses
        free pages and leaves them free."""
        kv, size = self.kv, self.kv.geometry.page_size
        kv.warm_up()
        # Two pages to attend to, and one that the longest verification runs out of.
        start, num_pages = 2 * size + 1, 3 + -(-max_draft_len // size)
        if num_pages > kv.plan.num_pages:
            return
        pages = torch.arange(1, num_pages + 1)
        widths = {1, *(min(2**n, max_draft_len + 1) for n in range(1, max_draft_len.bit_length()))}
        rows = [prefill_row(0, start, pages[:3], page_size=size, recent_pages=0)]
        rows += [
            Row(RowKind.VERIFY, start, width, pages[: -(-(start + width) // size)])
            for width in sorted(widths | {max_draft_len + 1})
        ]
        try:
            for row in rows:
                self.begin(ForwardPlan((row,)))
                k = torch.zeros(
                    (row.length, kv.geometry.num_kv_heads, kv.geometry.head_dim),
                    dtype=kv.geometry.dtype,
                    device=kv.device,
                )
                q = k.new_zeros((row.length, self._num_qo_heads, kv.geometry.head_dim))
                self.forward(0, q, k, k, kv.geometry.head_dim**-0.5)
                self.finish()
                # FlashInfer plans in pinned memory, which the next plan writes again.
                torch.cuda.synchronize()
            kv.capture_publishing()
        finally:
            kv.free_pages(pages.tolist())

    # Steps

    def make_draft_step(self, rows: DraftRows, batch: int) -> StepAttention:
        """Drafting attention of the first `batch` rows of `rows`, with a workspace of its own."""
        return AnchorStep(self.kv, self._num_qo_heads, rows, batch)

    def make_target_step(self, rows: DraftRows, batch: int) -> StepAttention:
        """The same at the target precision."""
        if isinstance(self._target, OrderedAttention):
            return OrderedStep(self.kv, rows, batch)
        if isinstance(self._target, ExactAttention):
            return ExactStep(self._target, self._num_qo_heads, rows, batch)
        return RecordStep(self.kv, self._num_qo_heads, rows, batch)

    @property
    def short_steps_differ(self) -> bool:
        """Whether short contexts have a quicker step at the target precision."""
        return isinstance(self._target, ExactAttention)

    def make_short_target_step(self, rows: DraftRows, batch: int) -> StepAttention:
        """The same for short contexts, where short_steps_differ."""
        return RecordStep(self.kv, self._num_qo_heads, rows, batch)

    def begin_steps(self, rows: DraftRows, step: StepAttention) -> None:
        self._steps = (rows, step)

    def end_steps(self) -> None:
        self._steps = None

    def _forward_step(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert self._steps is not None
        rows, step = self._steps
        kv, batch = self.kv, len(q)
        window_k, window_v = kv.window.layer(layer)
        if k.stride() != v.stride():
            k, v = k.contiguous(), v.contiguous()
        append(
            k,
            v,
            window_k,
            window_v,
            rows.slots[:batch],
            rows.offsets[:batch],
            rows.no_page[:batch],
            kv.anchors.layer(layer),
            rows.no_page[:batch],
            kv.residuals.cache_layer(layer),
            rows.no_page[:batch],
            kv.codec.settings,
            kv.codec.target,  # type: ignore[arg-type]
        )
        tail = Tail(
            window_k,
            window_v,
            rows.tail_indptr[: batch + 1],
            rows.tail_slots,
            rows.tail_lens[:batch],
        )
        return step.run(layer, q, tail)


class RefinedAttention:
    """The int8 target: VerifyAttention over anchors and corrections, in batches."""

    def __init__(self, kv: DeviceKV, num_qo_heads: int) -> None:
        geometry = kv.geometry
        if geometry.page_size != REFINED_BATCH:
            raise UnsupportedError(
                f"--kvspec-target int8 on a GPU needs --page-size 64, got {geometry.page_size}"
            )
        self._kv = kv
        self._heads = (
            *(num_qo_heads, geometry.num_kv_heads),
            *(geometry.head_dim, geometry.page_size),
        )
        # One for full batches and one for the rest: where the counters of one size end, the scratch
        # of another begins, and the kernel relies on finding its counters as it left them.
        self._workspaces = [torch.zeros(0, dtype=torch.uint8, device=kv.device) for _ in range(2)]
        self._batches: list[tuple[slice, VerifyAttention, tuple[torch.Tensor, ...]]] = []

    def plan(self, rows: TargetRows) -> None:
        self._batches = []
        num_rows = len(rows.tail_lens)
        device = self._kv.device
        on_device = {
            name: sent_to(device, getattr(rows, name))
            for name in ("past_pages", "tail_slots", "tail_lens", "tail_indptr", "past_indptr")
        }
        for first in range(0, num_rows, REFINED_BATCH):
            stop = min(first + REFINED_BATCH, num_rows)
            begin = int(rows.qo_indptr[first])
            end = int(rows.qo_indptr[stop])
            qo_indptr = sent_to(device, rows.qo_indptr[first : stop + 1] - begin)
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
        kv, geometry = self._kv, self._kv.geometry
        heads, head_kv, head_dim, page_size = self._heads
        nbytes = workspace_nbytes(
            batch_size=part.stop - part.start,
            num_qo_heads=heads,
            num_kv_heads=head_kv,
            head_dim=head_dim,
            page_size=page_size,
            settings=kv.codec.settings,
            device=kv.device,
            q_dtype=geometry.dtype,
            source="int8",
            max_qo_len=max_qo_len,
        )
        count = part.stop - part.start
        which = int(count < REFINED_BATCH)
        if len(self._workspaces[which]) < nbytes:
            self._workspaces[which] = torch.zeros(nbytes, dtype=torch.uint8, device=kv.device)
        attention = VerifyAttention(self._workspaces[which])
        attention.plan(
            qo_indptr,
            index["past_indptr"][part.start : part.stop + 1],
            index["past_pages"],
            torch.full((count,), page_size, dtype=torch.int32, device=kv.device),
            *self._heads,
            settings=kv.codec.settings,
            target="int8",
            q_dtype=geometry.dtype,
            max_qo_len=max_qo_len,
        )
        return attention

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
