"""CUDA graphs of draft steps with several tokens of each request."""

from __future__ import annotations

import logging
import time

import torch

from sglang_kvspec.adapters.compat.parallel_state import graph_capture
from sglang_kvspec.adapters.draft_weights import DraftWeights
from sglang_kvspec.adapters.forward_capture import ForwardCapture
from sglang_kvspec.adapters.step_graphs import WARM_UPS, time_empty_replay, weights_for
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.step_attention import StepAttention
from sglang_kvspec.runtime.wide_rows import WideRows

logger = logging.getLogger(__name__)

# Tokens of a request in a step, ascending. Pages are read once for 4 tokens of 4 query heads. With
# 16 tokens they are read again, which pays where nearly all proposals are kept.
WIDTHS = (4, 16)
# Tokens of a step. Up to about as many, weights take as long to read as to multiply with, and
# copies in 4 bits are used.
MOST_TOKENS = 64
# Numbers of requests.
BATCHES = (1, 2, 4, 8, 16)


def wide_sizes(max_batch: int, max_draft_len: int) -> list[tuple[int, int]]:
    """Return the sizes to capture, (requests, tokens of each), large ones last. A step of more
    tokens than a request may draft is not needed."""
    widths = [n for n, less in zip(WIDTHS, (1, *WIDTHS), strict=False) if less < max_draft_len]
    sizes = {(min(b, max_batch), n) for n in widths for b in BATCHES if b * n <= MOST_TOKENS}
    return sorted(sizes, key=lambda size: (size[0] * size[1], size))


class WideGraphs:
    """Captured draft steps over WideRows, one graph for each of wide_sizes()."""

    def __init__(
        self,
        forward: ForwardCapture,
        attention: DeviceAttention,
        drafts: DraftRows,
        max_draft_len: int,
        weights: DraftWeights | None = None,
    ) -> None:
        """drafts: rows of the rounds in which these steps are taken. weights: as for StepGraphs."""
        self._forward, self._attention, self._weights = forward, attention, weights
        self.rows = WideRows(drafts, MOST_TOKENS)
        self.sizes = wide_sizes(drafts.max_batch, max_draft_len)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        # A graph holds addresses only: the tensors there must live as long as the graph.
        self._steps: list[StepAttention] = []
        # Seconds of a step of requests without context, by size.
        self._empty_s: dict[tuple[int, int], float] = {}
        begin = time.perf_counter()
        with graph_capture() as context:
            # Large graphs first: small ones then fit in their memory.
            for size in reversed(self.sizes):
                self._capture(size, context.stream)
        self._empty_s = {
            size: time_empty_replay(self._graphs[size], self.rows) for size in self.sizes
        }
        self.rows.clear()
        if not self.sizes:
            # Requests of one draft need no step of several tokens.
            return
        smallest, largest = self.sizes[0], self.sizes[-1]
        logger.info(
            "KVSpec: captured draft steps of several tokens for %d sizes in %.1f s; without "
            "context, %d requests of %d tokens take %.2f ms and %d of %d take %.2f ms",
            len(self.sizes),
            time.perf_counter() - begin,
            *smallest,
            self._empty_s[smallest] * 1e3,
            *largest,
            self._empty_s[largest] * 1e3,
        )

    def empty_step_s(self, num_requests: int) -> dict[int, float]:
        """Return the seconds of a step of so many requests without context, by the tokens of each;
        empty where no graph has room."""
        widths = {n for batch, n in self.sizes if batch >= num_requests}
        return {n: self._empty_s[self._size(num_requests, n)] for n in sorted(widths)}

    def most_tokens(self, num_requests: int) -> int:
        """Return how many tokens of each of so many requests a step can run at most; 1 where no
        graph has room for more."""
        return max((n for batch, n in self.sizes if batch >= num_requests), default=1)

    def width(self, num_requests: int, num_tokens: int) -> int:
        """Return the tokens of a request in the smallest step with room for num_tokens of each."""
        return self._size(num_requests, num_tokens)[1]

    def replay(self, num_requests: int, num_tokens: int) -> torch.Tensor:
        """Run a step of the first requests of `rows`, loaded with this width. Return logits
        [>= num_requests * num_tokens, vocab], as StepGraphs.replay()."""
        assert self._forward.logits is not None
        size = self._size(num_requests, num_tokens)
        assert size[1] == num_tokens, "rows were loaded with another width"
        self._graphs[size].replay()
        return self._forward.logits

    def _size(self, num_requests: int, num_tokens: int) -> tuple[int, int]:
        fits = (s for s in self.sizes if s[0] >= num_requests and s[1] >= num_tokens)
        return min(fits, key=lambda size: (size[1], size[0]))

    def _capture(self, size: tuple[int, int], stream: torch.cuda.Stream) -> None:
        batch, num_rows = size
        step = self._attention.make_draft_step(self.rows.drafts, batch, num_rows)
        self._steps.append(step)
        self._attention.begin_wide_steps(self.rows, step, num_rows)
        try:
            with weights_for(self._weights, batch * num_rows):
                self._graphs[size] = self._forward.capture(
                    self.rows, batch * num_rows, stream, WARM_UPS
                )
        finally:
            self._attention.end_captured()
