"""CUDA graphs of verifications: to enqueue one takes the CPU as little time as a draft step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_kvspec.adapters.compat.parallel_state import graph_capture
from sglang_kvspec.adapters.forward_capture import ForwardCapture, StaticRows
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import VerifyLogits
from sglang_kvspec.engine.row_tokens import row_tokens
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row
from sglang_kvspec.kv.transfers import send_into
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.device_pages import DevicePages
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows, draft_row, open_for_drafts
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.head_lists import HeadLists
from sglang_kvspec.runtime.piggyback_rows import PiggybackRows
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.target_attention import CapturedTarget
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize, find_size, sizes_to_capture

logger = logging.getLogger(__name__)

# One is enough: steps, and the warm-up of attention, have run every kernel.
WARM_UPS = 1


def sizes_of(
    runner: Any, attention: DeviceAttention, max_draft_len: int, max_piggyback: int
) -> tuple[VerifySize, ...]:
    """Return the sizes of verifications to capture, for requests with up to max_draft_len drafts
    and up to max_piggyback piggyback drafts of other requests."""
    longest, counts = max_draft_len + 1, attention.query_counts
    return sizes_to_capture(runner.max_running_requests, longest, counts, max_piggyback)


class VerifyGraphs:
    """Captured forwards of the model over VerifyRows, at the target precision, for some sizes. A
    verification that fits in none of them runs without a graph. Other requests may piggyback one
    draft each on the same forward, which reads the model's weights once for both."""

    def __init__(
        self,
        runner: Any,
        forward: ForwardCapture,
        attention: DeviceAttention,
        max_draft_len: int,
        sizes: Sequence[VerifySize],
        max_piggyback: int = 0,
        lists: HeadLists | None = None,
        chosen: DevicePages | None = None,
    ) -> None:
        """sizes: from sizes_of(). max_piggyback: requests that may piggyback a draft. lists: where
        a view selects by layer and KV head for these drafts. chosen: selects the pages that they
        read, for a MassView."""
        self._forward, self._attention = forward, attention
        self._lists, self._chosen = lists, chosen
        self.max_piggyback = max_piggyback
        kv = attention.kv
        page, max_rows = kv.geometry.page_size, runner.max_running_requests
        max_tokens = max(size.num_tokens for size in sizes)
        # Most pages that a request writes to, beyond the first one.
        more = -(-max_draft_len // page)
        splits = attention.splits_by_page
        width = -(-runner.req_to_token_pool.req_to_token.shape[1] // page)
        tokens = torch.zeros((2, max_piggyback + max_tokens), dtype=torch.int64, device=kv.device)
        self._rows = VerifyRows(
            max_tokens,
            max_rows,
            min(max_rows * (1 + more), max_tokens) if splits else max_tokens,
            max_pages=width,
            max_past=max_rows * width * (1 + more if splits else 1),
            max_tail=max_rows * (1 + more),
            max_encoded=max_rows * more if splits else 0,
            page_size=page,
            device=kv.device,
            tokens=tokens[:, max_piggyback:],
        )
        self._piggyback: PiggybackRows | None = None
        if max_piggyback:
            places = tokens[:, :max_piggyback]
            by_mass = chosen is not None
            drafts = DraftRows(max_piggyback, 1, width, page, kv.device, places, lists, by_mass)
            self._piggyback = PiggybackRows(drafts, self._rows, tokens)
            self._step = attention.make_draft_step(drafts, max_piggyback)
        verifications = attention.make_verifications(self._rows)
        self.sizes = [size for size in sizes if verifications.has_room(size)]
        self._graphs: dict[VerifySize, torch.cuda.CUDAGraph] = {}
        self._graphs_piggyback: dict[VerifySize, torch.cuda.CUDAGraph] = {}
        # A graph holds addresses only: the tensors there must live as long as the graph.
        self._attended: dict[VerifySize, CapturedTarget] = {}
        with graph_capture() as context:
            # Large graphs first: small ones then fit in their memory.
            for size in sorted(self.sizes, reverse=True):
                # Both graphs of a size come before the next size, whose plan replaces this one's.
                self._attended[size] = verifications.make(size)
                self._graphs[size] = self._capture(size, context.stream)
                if self._piggyback is not None:
                    self._graphs_piggyback[size] = self._capture_piggyback(size, context.stream)
        self._rows.clear()
        if self._piggyback is not None:
            self._piggyback.clear()
        without = [size for size in sizes if size not in self.sizes]
        logger.info(
            "KVSpec: captured verifications of %d sizes%s%s",
            len(self.sizes),
            f", each also with up to {max_piggyback} piggyback drafts" if max_piggyback else "",
            f"; larger than the workspace: {', '.join(map(str, without))}" if without else "",
        )

    def _capture(self, size: VerifySize, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        self._attention.begin_verification(self._rows, self._attended[size])
        return self._captured(self._rows, size.num_tokens, stream)

    def _capture_piggyback(
        self, size: VerifySize, stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        rows = self._piggyback
        assert rows is not None
        attended = self._attended[size]
        self._attention.begin_piggyback(rows.drafts, self._step, rows.verify, attended)
        return self._captured(rows, self.max_piggyback + size.num_tokens, stream)

    def _captured(
        self, rows: StaticRows, num_tokens: int, stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        """Capture a forward with the attention that was begun, and end that attention."""
        try:
            return self._forward.capture(rows, num_tokens, stream, WARM_UPS)
        finally:
            self._attention.end_captured()

    def run(
        self,
        batch: RoundBatch,
        rows: Mapping[int, Row],
        made: DraftedTokens | None,
        piggyback: Mapping[int, Row],
    ) -> VerifyLogits | None:
        """Run VERIFY rows, and a draft of each of up to max_piggyback other requests. Return None,
        and do nothing, if no graph has room. The next replay overwrites the result."""
        plan = ForwardPlan(tuple(rows.values()))
        size = find_size(self.sizes, [row.length for row in plan.rows])
        if size is None:
            return None
        kv = self._attention.kv
        # Open all pages before indices are made: opening one can move others out of the window.
        for row in piggyback.values():
            open_for_drafts(kv, row.start, row.pages, 1)
        laid = row_tokens(batch.states, rows)
        with self._attention.laid_out(plan) as target:
            values = self._rows.values_of(target, laid.tokens, laid.positions)
            if piggyback:
                assert self._piggyback is not None, (
                    "the graphs must be captured with piggyback drafts"
                )
                self._piggyback.drafts.begin_round()
                drafts = [self._draft_row(batch.states[i], row) for i, row in piggyback.items()]
                values += self._piggyback.drafts.values_of(drafts)
            send_into(values)
            if piggyback and self._chosen is not None:
                assert self._piggyback is not None
                self._chosen.select(self._piggyback.drafts)
            if self._attention.queries is not None:
                self._attention.queries.begin_captured(plan.rows)
            if made is not None:
                self._place(made, laid.firsts, piggyback)
            self._attended[size].plan(target)
            (self._graphs_piggyback if piggyback else self._graphs)[size].replay()
        every = self._forward.logits
        assert every is not None
        if not piggyback:
            return VerifyLogits(every[: plan.num_tokens])
        return VerifyLogits(
            every[self.max_piggyback :][: plan.num_tokens],
            every[: len(piggyback)],
            self._drafted(piggyback, len(batch.states)),
        )

    def _draft_row(self, state: RequestState, row: Row) -> DraftRow:
        """Return the row of a piggyback draft."""
        kv, counts = self._attention.kv, None
        if self._chosen is not None:
            counts = self._chosen.counts(state, row.start // kv.geometry.page_size)
        token, slot = state.last_token, state.slot
        return draft_row(kv, token, row.start, row.pages, 1, row.seen, counts, slot, self._lists)

    def _place(
        self, made: DraftedTokens, firsts: Sequence[int], piggyback: Mapping[int, Row]
    ) -> None:
        """Copy drafts that only the device knows to where the forward reads them."""
        if not piggyback:
            made.place(self._rows.input_ids, firsts)
            return
        assert self._piggyback is not None
        behind = [first if first < 0 else self.max_piggyback + first for first in firsts]
        lasts = [-1] * len(firsts)
        for place, i in enumerate(piggyback):
            lasts[i] = place
        made.place(self._piggyback.input_ids, behind, lasts)

    def _drafted(self, piggyback: Mapping[int, Row], num_requests: int) -> DraftedTokens:
        assert self._piggyback is not None
        tokens = self._piggyback.drafts.drafts[:, : len(piggyback)]
        return DraftedTokens.of_one_step(tokens, list(piggyback), num_requests)
