"""Attention over a GpuKVCache: KVSpec's kernels for drafts, a TargetAttention for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.kv.gpu_cache import GpuKVCache, RecordSlots
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.kv.transfers import fields_to_device
from sglang_kvspec.runtime.captured_layers import (
    CapturedLayers,
    PiggybackLayers,
    StepLayers,
    VerifyLayers,
)
from sglang_kvspec.runtime.device_queries import DeviceQueries
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.earlier_tokens import EarlierTokens
from sglang_kvspec.runtime.layer_observer import LayerObserver
from sglang_kvspec.runtime.side_stream import SideStream
from sglang_kvspec.runtime.step_attention import AnchorStep, StepAttention
from sglang_kvspec.runtime.target_attention import (
    CapturedTarget,
    TargetAttention,
    TargetVerifications,
)
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.wide_rows import WideRows

KV = tuple[torch.Tensor, torch.Tensor]


class DeviceAttention:
    """Attention that writes the KV of a planned forward and attends, layer by layer, like
    ReferenceAttention.

    Inside `with planned(plan)`, call forward(layer, ...) once for every layer. Between
    begin_steps(), begin_verification() or begin_piggyback() and end_captured(), forward() works on
    DraftRows, VerifyRows or both instead, which a CUDA graph may capture.
    """

    def __init__(self, kv: GpuKVCache, num_qo_heads: int, target: TargetAttention) -> None:
        """target: made for `kv` and num_qo_heads."""
        self.kv = kv
        self._num_qo_heads = num_qo_heads
        self._target = target
        self._rows: TargetRows | None = None
        self._scratch: KV | None = None
        self._index: dict[str, torch.Tensor] = {}
        self._encode_slots: RecordSlots | None = None
        self._captured: CapturedLayers | None = None
        # Queries of the newest forward at the target precision, where a draft view needs them.
        self.queries: DeviceQueries | None = None
        self._observer: LayerObserver | None = None
        # Rows that the observer is shown: index, tokens of the forward, earlier tokens.
        self._shown: list[tuple[int, slice, EarlierTokens]] = []
        # Stream of piggyback drafts, while other requests verify.
        self._piggyback = SideStream(kv.device)

    def keep_queries(self, most: int, max_rows: int, max_draft_len: int) -> DeviceQueries:
        """Keep the queries of all later forwards, `most` of each request. Call this before anything
        is captured. max_rows: requests of a forward."""
        geometry = self.kv.geometry
        shape = (geometry.num_layers, self._num_qo_heads, geometry.head_dim)
        sizes = (most, max_rows, max_draft_len)
        self.queries = DeviceQueries(*sizes, shape, geometry.dtype, self.kv.device)
        return self.queries

    def show(self, observer: LayerObserver) -> None:
        """Show an observer the PREFILL and REPEAT rows of all later forwards."""
        self._observer = observer

    # Target

    @contextmanager
    def planned(self, plan: ForwardPlan) -> Iterator[None]:
        """Run a forward over the rows of a plan, layer by layer with forward(). Raises
        CapacityError if the KV cache has no room for its pages."""
        assert self._rows is None, "the previous forward has not finished"
        with self.laid_out(plan) as rows:
            self._begin(rows)
            if self.queries is not None:
                self.queries.begin(plan.rows)
            if self._observer is not None:
                self._observer.begin(plan.rows)
                self._shown = list(self._rows_to_show(plan))
            yield
        if self._observer is not None:
            self._observer.end()
        self._rows = self._scratch = None
        self._index, self._encode_slots = {}, None

    def _rows_to_show(self, plan: ForwardPlan) -> Iterator[tuple[int, slice, EarlierTokens]]:
        first = 0
        for index, row in enumerate(plan.rows):
            span = slice(first, first + row.length)
            first += row.length
            if row.kind in (RowKind.PREFILL, RowKind.REPEAT):
                yield index, span, EarlierTokens(self.kv, row.pages, row.start)

    def laid_out(self, plan: ForwardPlan) -> AbstractContextManager[TargetRows]:
        """Return a context in which the KV cache is ready for a forward over the plan. The caller
        plans the attention."""
        return self.kv.forward(plan, split_by_page=self.splits_by_page)

    def _begin(self, rows: TargetRows) -> None:
        names = (
            *("token_slots", "token_offsets", "encode_source", "encode_pages"),
            *("fill_scratch", "fill_window", "keep_scratch", "keep_window"),
        )
        self._rows = rows
        index = self._index = fields_to_device(self.kv.device, rows, names)
        self._encode_slots = self.kv.record_slots_of(index["encode_pages"])
        if rows.num_scratch:
            geometry = self.kv.geometry
            heads = (geometry.num_kv_heads, geometry.head_dim)
            shape = (2, rows.num_scratch, geometry.page_size, *heads)
            k, v = torch.empty(shape, dtype=geometry.dtype, device=self.kv.device)
            self._scratch = (k, v)
        self._target.plan(rows)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store k and v, and return the attention output, like q and contiguous.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]. Raises
        UnsupportedError for a scale other than 1 / sqrt(head_dim).
        """
        if not math.isclose(scale, self.kv.geometry.head_dim**-0.5, rel_tol=1e-6):
            raise UnsupportedError(
                "--kvspec on a GPU needs an attention scale of 1/sqrt(head size), got "
                f"{scale}: serve this model without --kvspec"
            )
        if self._captured is not None:
            return self._captured.forward(layer, q, k, v)
        assert self._rows is not None, "forward() was called outside of planned()"
        # Prefill may be padded for a graph or a collective; padding attends to nothing.
        num_tokens = self._rows.num_tokens
        new = (k[:num_tokens], v[:num_tokens])
        if self.queries is not None:
            self.queries.keep(layer, q[:num_tokens])
        tail = self._write(layer, *new)
        self.kv.await_layer(layer)
        if self._observer is not None:
            self._show_layer(layer, q, *new, scale)
        out = self._target.run(layer, q[:num_tokens], tail, new)
        if len(q) == num_tokens:
            return out
        return torch.cat((out, out.new_zeros((len(q) - num_tokens, *out.shape[1:]))))

    def _show_layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> None:
        assert self._observer is not None
        for index, span, earlier in self._shown:
            context = partial(earlier.followed_by, layer, k[span], v[span])
            self._observer.observe(layer, index, q[span], context, scale)

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> KV:
        """Store k, v in the tail pool, and encode the pages that this forward encodes. Returns the
        pool."""
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
            assert self._encode_slots is not None
            self.kv.encode_from(layer, *pool, index["encode_source"], self._encode_slots)
        return pool

    def warm_up(self, max_draft_len: int) -> None:
        """Run the forwards of serving once, so that no request waits for compiling or loading. Uses
        free pages and leaves them free. No observer is shown these forwards."""
        kv, size = self.kv, self.kv.geometry.page_size
        kv.warm_up()
        # Two pages to attend to, and one that the longest verification fills and leaves.
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
        observer, self._observer = self._observer, None
        try:
            for row in rows:
                k = torch.zeros(
                    (row.length, kv.geometry.num_kv_heads, kv.geometry.head_dim),
                    dtype=kv.geometry.dtype,
                    device=kv.device,
                )
                q = k.new_zeros((row.length, self._num_qo_heads, kv.geometry.head_dim))
                with self.planned(ForwardPlan((row,))):
                    self.forward(0, q, k, k, kv.geometry.head_dim**-0.5)
                # FlashInfer plans in pinned memory, which the next plan overwrites.
                torch.cuda.synchronize()
            kv.capture_commits()
        finally:
            kv.free_pages(pages.tolist())
            self._observer = observer

    # Steps

    def make_draft_step(self, rows: DraftRows, batch: int, num_rows: int = 1) -> StepAttention:
        """Make the drafting attention of the first `batch` rows, with a workspace of its own.
        num_rows: tokens of each row."""
        return AnchorStep(self.kv, self._num_qo_heads, rows, batch, num_rows=num_rows)

    def make_target_step(self, rows: DraftRows, batch: int) -> StepAttention:
        """Make the attention of a step of the first `batch` rows at the target precision."""
        return self._target.step(rows, batch)

    @property
    def short_steps_differ(self) -> bool:
        """Return True if short contexts have a faster step at the target precision."""
        return self._target.short_steps_differ

    def make_short_target_step(self, rows: DraftRows, batch: int) -> StepAttention:
        """Make the step at the target precision for short contexts."""
        return self._target.short_step(rows, batch)

    def begin_steps(self, rows: DraftRows, step: StepAttention) -> None:
        self._captured = StepLayers(self.kv, rows, step)

    def begin_wide_steps(self, rows: WideRows, step: StepAttention, num_rows: int) -> None:
        """Begin draft steps of num_rows tokens of each request."""
        self._captured = StepLayers(self.kv, rows, step, num_rows)

    # Captured verifications

    def make_verifications(self, rows: VerifyRows) -> TargetVerifications:
        """Make the factory for captured verifications over `rows`."""
        return self._target.verifications(rows)

    @property
    def query_counts(self) -> list[int]:
        """Numbers of a request's tokens beyond which a verification uses another kernel."""
        return [count for tile in self._target.query_tiles if (count := tile // self._group)]

    @property
    def tokens_of_a_pass(self) -> int | None:
        """Return for how many tokens of a request a verification reads its KV once, None if reading
        it again costs little."""
        rows = self._target.rows_of_a_pass
        return None if rows is None else rows // self._group

    @property
    def _group(self) -> int:
        """Number of query heads of a KV head."""
        return self._num_qo_heads // self.kv.geometry.num_kv_heads

    @property
    def splits_by_page(self) -> bool:
        """Return True if every page that a request's tokens are on is a part of its own."""
        return self._target.splits_by_page

    def begin_verification(self, rows: VerifyRows, attention: CapturedTarget) -> None:
        self._captured = VerifyLayers(self.kv, rows, attention, self.queries)

    def begin_piggyback(
        self, drafts: DraftRows, step: StepAttention, rows: VerifyRows, attention: CapturedTarget
    ) -> None:
        """Begin forwards of a draft step of all rows of `drafts`, followed by a verification."""
        step_layers = StepLayers(self.kv, drafts, step)
        verification = VerifyLayers(self.kv, rows, attention, self.queries)
        self._captured = PiggybackLayers(
            step_layers, drafts.max_batch, verification, self._piggyback
        )

    def end_captured(self) -> None:
        """Return to planned forwards."""
        self._captured = None
