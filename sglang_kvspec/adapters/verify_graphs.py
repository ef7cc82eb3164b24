"""CUDA graphs of verifications, so that enqueuing one takes the CPU as little as a draft does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.distributed.parallel_state import graph_capture

from sglang_kvspec.adapters.forward_capture import ForwardCapture, StaticRows
from sglang_kvspec.pools.transfers import send_into
from sglang_kvspec.runtime.beside_rows import BesideDraft, BesideRows
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftRows, draft_row, open_for_drafts
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.forward_plan import ForwardPlan
from sglang_kvspec.runtime.verify_attention import CapturedTarget
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize, find_size, sizes_to_capture

logger = logging.getLogger(__name__)

# Every kernel ran before, in steps and in the warm-up of attention.
WARM_UPS = 1


def sizes_of(
    runner: Any, attention: DeviceAttention, max_draft_len: int, max_beside: int
) -> tuple[VerifySize, ...]:
    """For which verifications a server is to have graphs whose requests draft up to so many tokens,
    while up to max_beside others draft."""
    longest, counts = max_draft_len + 1, attention.query_counts
    return sizes_to_capture(runner.max_running_requests, longest, counts, max_beside)


class VerifiedLogits(NamedTuple):
    """logits [num_tokens, vocab], which the next replay overwrites. drafted: drafts that were made
    beside, where there are any."""

    logits: torch.Tensor
    drafted: DraftedTokens | None


class VerifyGraphs:
    """The model's forward over VerifyRows at the target precision, captured for some sizes. What
    has no room in them runs without a graph. Others may draft once in the same forward, which reads
    the model's weights once for both."""

    def __init__(
        self,
        runner: Any,
        forward: ForwardCapture,
        attention: DeviceAttention,
        max_draft_len: int,
        sizes: Sequence[VerifySize],
        max_beside: int = 0,
    ) -> None:
        """sizes: what sizes_of() gives. max_beside: requests that may draft beside."""
        self._forward, self._attention = forward, attention
        self.max_beside = max_beside
        kv = attention.kv
        page, max_rows = kv.geometry.page_size, runner.max_running_requests
        max_tokens = max(size.num_tokens for size in sizes)
        # Beyond the first one, a request writes to so many pages at most.
        more = -(-max_draft_len // page)
        splits = attention.splits_by_page
        width = -(-runner.req_to_token_pool.req_to_token.shape[1] // page)
        tokens = torch.zeros((2, max_beside + max_tokens), dtype=torch.int64, device=kv.device)
        self._rows = VerifyRows(
            max_tokens,
            max_rows,
            min(max_rows * (1 + more), max_tokens) if splits else max_tokens,
            max_past=max_rows * width * (1 + more if splits else 1),
            max_tail=max_rows * (1 + more),
            max_encoded=max_rows * more if splits else 0,
            page_size=page,
            device=kv.device,
            tokens=tokens[:, max_beside:],
        )
        self._beside: BesideRows | None = None
        if max_beside:
            drafts = DraftRows(max_beside, 1, width, page, kv.device, tokens[:, :max_beside])
            self._beside = BesideRows(drafts, self._rows, tokens)
            self._step = attention.make_draft_step(drafts, max_beside)
        verifications = attention.make_verifications(self._rows)
        self.sizes = [size for size in sizes if verifications.has_room(size)]
        self._graphs: dict[VerifySize, torch.cuda.CUDAGraph] = {}
        self._graphs_beside: dict[VerifySize, torch.cuda.CUDAGraph] = {}
        # A graph knows addresses only: what lies there must live as long.
        self._attended: dict[VerifySize, CapturedTarget] = {}
        with graph_capture() as context:
            # Large ones first: the small ones then fit in their memory.
            for size in sorted(self.sizes, reverse=True):
                # Both of a size before the next is made, whose plan takes the place of this one's.
                self._attended[size] = verifications.make(size)
                self._graphs[size] = self._capture(size, context.stream)
                if self._beside is not None:
                    self._graphs_beside[size] = self._capture_beside(size, context.stream)
        self._rows.clear()
        if self._beside is not None:
            self._beside.clear()
        without = [size for size in sizes if size not in self.sizes]
        logger.info(
            "KVSpec: captured verifications of %d sizes%s%s",
            len(self.sizes),
            f", each also with up to {max_beside} drafts beside" if max_beside else "",
            f"; larger than the workspace: {', '.join(map(str, without))}" if without else "",
        )

    def _capture(self, size: VerifySize, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        self._attention.begin_verification(self._rows, self._attended[size])
        return self._captured(self._rows, size.num_tokens, stream)

    def _capture_beside(self, size: VerifySize, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        rows = self._beside
        assert rows is not None
        attended = self._attended[size]
        self._attention.begin_beside(rows.drafts, self._step, rows.verify, attended)
        return self._captured(rows, self.max_beside + size.num_tokens, stream)

    def _captured(
        self, rows: StaticRows, num_tokens: int, stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        """With the attention that was begun, which ends."""
        try:
            return self._forward.capture(rows, num_tokens, stream, WARM_UPS)
        finally:
            self._attention.end_captured()

    def run(
        self,
        plan: ForwardPlan,
        tokens: Sequence[int],
        positions: Sequence[int],
        drafted: DraftedTokens | None,
        firsts: Sequence[int],
        beside: Sequence[BesideDraft] = (),
    ) -> VerifiedLogits | None:
        """Run a plan of VERIFY rows. None, and nothing was done, where no graph has room.

        tokens, positions: of each row's tokens. drafted: drafts that are only on the device, of
        request i from tokens[firsts[i]] on, or -1 where it does not verify. beside: requests that
        do not, up to max_beside, of which each drafts once.
        """
        size = find_size(self.sizes, [row.length for row in plan.rows])
        if size is None:
            return None
        kv = self._attention.kv
        # All pages before the first index: opening one can move others out of the window.
        for each in beside:
            open_for_drafts(kv, each.row.start, each.row.pages, 1)
        rows = self._attention.open(plan)
        values = self._rows.values_of(rows, tokens, positions)
        if beside:
            assert self._beside is not None, "graphs without drafts beside"
            self._beside.drafts.begin_round()
            drafts = [
                draft_row(kv, each.token, each.row.start, each.row.pages, 1) for each in beside
            ]
            values += self._beside.drafts.values_of(drafts)
        send_into(values)
        if drafted is not None:
            self._place(drafted, firsts, beside)
        self._attended[size].plan(rows)
        (self._graphs_beside if beside else self._graphs)[size].replay()
        self._attention.finish()
        assert self._forward.logits is not None
        if not beside:
            return VerifiedLogits(self._forward.logits[: plan.num_tokens], None)
        logits = self._forward.logits[self.max_beside :][: plan.num_tokens]
        return VerifiedLogits(logits, self._drafted(beside, len(firsts)))

    def _place(
        self, drafted: DraftedTokens, firsts: Sequence[int], beside: Sequence[BesideDraft]
    ) -> None:
        if not beside:
            drafted.place(self._rows.input_ids, firsts)
            return
        assert self._beside is not None
        behind = [first if first < 0 else self.max_beside + first for first in firsts]
        lasts = [-1] * len(firsts)
        for place, each in enumerate(beside):
            lasts[each.index] = place
        drafted.place(self._beside.input_ids, behind, lasts)

    def _drafted(self, beside: Sequence[BesideDraft], num_requests: int) -> DraftedTokens:
        assert self._beside is not None
        tokens = self._beside.drafts.drafts[:, : len(beside)]
        return DraftedTokens.of_one_step(tokens, [each.index for each in beside], num_requests)
