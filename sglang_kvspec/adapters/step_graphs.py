"""CUDA graphs of one step over DraftRows, one graph for each batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from sglang_kvspec.adapters.compat.parallel_state import graph_capture
from sglang_kvspec.adapters.draft_weights import DraftWeights
from sglang_kvspec.adapters.forward_capture import ForwardCapture, StaticRows
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.step_attention import StepAttention

# Finer than powers of two: a spare row costs a row in each product of weights, but no attention.
SMALL_BATCHES = (1, 2, 4)
BATCH_STEP = 4
COARSE_FROM, COARSE_STEP = 32, 8
WARM_UPS = 2
TIMED_STEPS = 5
# Library that is tried beside torch's. A product's shape decides which is faster: on an H200 with a
# model of 32B, this one takes 1 to 3 % less time for 16 to 64 rows, and 18 % more for 149.
OTHER_BLAS = "cublaslt"


def time_empty_replay(graph: torch.cuda.CUDAGraph, rows: StaticRows) -> float:
    """Return the seconds of a captured step of rows without context, the least of TIMED_STEPS.
    Clears the rows before each."""
    seconds = []
    for _ in range(TIMED_STEPS):
        rows.clear()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def batch_sizes(max_batch: int) -> list[int]:
    """Return the sizes to capture, ascending. The last one is max_batch."""
    sizes = {*SMALL_BATCHES, *range(BATCH_STEP, COARSE_FROM, BATCH_STEP)}
    sizes |= set(range(COARSE_FROM, max_batch, COARSE_STEP))
    return sorted({size for size in sizes if size < max_batch} | {max_batch})


class StepGraphs:
    """Captured forwards of the model over DraftRows, with one kind of attention."""

    def __init__(
        self,
        forward: ForwardCapture,
        attention: DeviceAttention,
        rows: DraftRows,
        make_attention: Callable[[DraftRows, int], StepAttention],
        *,
        may_use_other_blas: bool = False,
        weights: DraftWeights | None = None,
    ) -> None:
        """make_attention: makes the attention of the first n rows. may_use_other_blas: OTHER_BLAS
        computes products if it is faster, although it rounds differently from torch's library.
        weights: copies that graphs of up to weights.most_rows rows multiply with."""
        self._forward = forward
        self._attention = attention
        self._rows = rows
        self._make_attention = make_attention
        self._may_use_other_blas = may_use_other_blas
        self._weights = weights
        self.batch_sizes = batch_sizes(rows.max_batch)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # A graph holds addresses only: the tensors there must live as long as the graph.
        self._steps: dict[int, StepAttention] = {}
        with graph_capture() as context:
            # Large graphs first: small ones then fit in their memory.
            for batch in reversed(self.batch_sizes):
                self._capture(batch, context.stream)
        rows.clear()

    def _size(self, batch: int) -> int:
        return next(size for size in self.batch_sizes if size >= batch)

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """Plan the attention of a round over these rows, with which DraftRows was loaded."""
        self._steps[self._size(len(rows))].plan(rows)

    def replay(self, batch: int) -> torch.Tensor:
        """Run a step of the first `batch` rows. Return logits [>= batch, vocab]. The next replay of
        any graph with the same ForwardCapture overwrites them."""
        assert self._forward.logits is not None
        self._graphs[self._size(batch)].replay()
        return self._forward.logits

    def time_empty_step(self) -> float:
        """Return the seconds of a step of one row without context: model weights, and launches."""
        return self._time(self._graphs[self._size(1)])

    def _time(self, graph: torch.cuda.CUDAGraph) -> float:
        return time_empty_replay(graph, self._rows)

    def _capture(self, batch: int, stream: torch.cuda.Stream) -> None:
        attended = self._make_attention(self._rows, batch)
        attended.plan([])
        self._steps[batch] = attended
        self._attention.begin_steps(self._rows, attended)
        try:
            with weights_for(self._weights, batch):
                graph = self._forward.capture(self._rows, batch, stream, WARM_UPS)
                if self._may_use_other_blas:
                    with _other_blas():
                        other = self._forward.capture(self._rows, batch, stream, WARM_UPS)
                    graph = min(graph, other, key=self._time)
        finally:
            self._attention.end_captured()
        self._graphs[batch] = graph


def weights_for(weights: DraftWeights | None, num_tokens: int) -> AbstractContextManager[None]:
    """Return the context in which a draft step of num_tokens is captured: with the copies of
    weights, if there are any for so many rows."""
    if weights is not None and num_tokens <= weights.most_rows:
        return weights.in_force()
    return nullcontext()


@contextmanager
def _other_blas() -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(OTHER_BLAS)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
