"""CUDA graphs of verifications, so that enqueuing one takes the CPU as little as a draft does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture

from sglang_kvspec.adapters.forward_capture import ForwardCapture
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftedTokens
from sglang_kvspec.runtime.forward_plan import ForwardPlan
from sglang_kvspec.runtime.verify_attention import CapturedTarget
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize, find_size, sizes_to_capture

logger = logging.getLogger(__name__)

# Every kernel ran before, in steps and in the warm-up of attention.
WARM_UPS = 1


def sizes_of(runner: Any, attention: DeviceAttention, max_draft_len: int) -> tuple[VerifySize, ...]:
    """For which verifications a server is to have graphs."""
    longest, counts = max_draft_len + 1, attention.query_counts
    return sizes_to_capture(runner.max_running_requests, longest, counts)


class VerifyGraphs:
    """The model's forward over VerifyRows at the target precision, captured for some sizes. What
    has no room in them runs without a graph."""

    def __init__(
        self,
        runner: Any,
        forward: ForwardCapture,
        attention: DeviceAttention,
        max_draft_len: int,
        sizes: Sequence[VerifySize],
    ) -> None:
        """sizes: what sizes_of() gives."""
        self._forward, self._attention = forward, attention
        kv = attention.kv
        page, max_rows = kv.geometry.page_size, runner.max_running_requests
        max_tokens = max(size.num_tokens for size in sizes)
        # Beyond the first one, a request writes to so many pages at most.
        more = -(-max_draft_len // page)
        splits = attention.splits_by_page
        width = -(-runner.req_to_token_pool.req_to_token.shape[1] // page)
        self._rows = VerifyRows(
            max_tokens,
            max_rows,
            min(max_rows * (1 + more), max_tokens) if splits else max_tokens,
            max_past=max_rows * width * (1 + more if splits else 1),
            max_tail=max_rows * (1 + more),
            max_encoded=max_rows * more if splits else 0,
            page_size=page,
            device=kv.device,
        )
        verifications = attention.make_verifications(self._rows)
        self.sizes = [size for size in sizes if verifications.has_room(size)]
        self._graphs: dict[VerifySize, torch.cuda.CUDAGraph] = {}
        self._attended: dict[VerifySize, CapturedTarget] = {}
        with graph_capture() as context:
            # Large ones first: the small ones then fit in their memory.
            for size in sorted(self.sizes, reverse=True):
                self._attended[size] = attended = verifications.make(size)
                attention.begin_verification(self._rows, attended)
                try:
                    graph = forward.capture(self._rows, size.num_tokens, context.stream, WARM_UPS)
                finally:
                    attention.end_captured()
                self._graphs[size] = graph
        self._rows.clear()
        without = [size for size in sizes if size not in self.sizes]
        logger.info(
            "KVSpec: captured verifications of %d sizes%s",
            len(self.sizes),
            f"; larger than the workspace: {', '.join(map(str, without))}" if without else "",
        )

    def run(
        self,
        plan: ForwardPlan,
        tokens: Sequence[int],
        positions: Sequence[int],
        drafted: DraftedTokens | None,
        firsts: Sequence[int],
    ) -> torch.Tensor | None:
        """Run a plan of VERIFY rows. Returns logits [num_tokens, vocab], which the next replay
        overwrites; None, and nothing was done, where no graph has room.

        tokens, positions: of each row's tokens. drafted: drafts that are only on the device, of
        request i from tokens[firsts[i]] on, or -1 where it does not verify.
        """
        size = find_size(self.sizes, [row.length for row in plan.rows])
        if size is None:
            return None
        rows = self._attention.open(plan)
        self._rows.load(rows, tokens, positions)
        if drafted is not None:
            drafted.place(self._rows.input_ids, firsts)
        self._attended[size].plan(rows)
        self._graphs[size].replay()
        self._attention.finish()
        assert self._forward.logits is not None
        return self._forward.logits[: plan.num_tokens]
