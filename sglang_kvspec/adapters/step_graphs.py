"""CUDA graphs of one step over DraftRows, one a batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.layers.dp_attention import (
    DpPaddingMode,
    set_dp_buffer_len,
    set_is_extend_in_batch,
)
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.step_attention import StepAttention

# Finer than powers of two: a row too many costs a row of every weight's product, no attention.
SMALL_BATCHES = (1, 2, 4)
BATCH_STEP = 4
COARSE_FROM, COARSE_STEP = 32, 8
WARM_UPS = 2
TIMED_STEPS = 5


def batch_sizes(max_batch: int) -> list[int]:
    """Sizes to capture, ascending, the last being max_batch."""
    sizes = {*SMALL_BATCHES, *range(BATCH_STEP, COARSE_FROM, BATCH_STEP)}
    sizes |= set(range(COARSE_FROM, max_batch, COARSE_STEP))
    return sorted({size for size in sizes if size < max_batch} | {max_batch})


class StepGraphs:
    """The model's forward over DraftRows with one kind of attention, captured."""

    def __init__(
        self,
        runner: Any,
        attention: DeviceAttention,
        rows: DraftRows,
        make_attention: Callable[[DraftRows, int], StepAttention],
        pool: Any,
        logits: torch.Tensor | None = None,
    ) -> None:
        """make_attention: of the first so many rows. pool: torch.cuda.graph_pool_handle(), which
        graphs may share that are never replayed at once. logits: where these leave theirs,
        [max_batch, vocab], if others have such a place already."""
        self._runner = runner
        self._attention = attention
        self._rows = rows
        self._make_attention = make_attention
        self.batch_sizes = batch_sizes(rows.max_batch)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # One for all: graphs keep their own outputs apart, which for 30 batch sizes are gigabytes.
        self.logits = logits
        # A graph knows addresses only: what lies there must live as long.
        self._steps: dict[int, StepAttention] = {}
        self._kept: list[ForwardBatch] = []
        with graph_capture() as context:
            # Large ones first: the small ones then fit in their memory.
            for batch in reversed(self.batch_sizes):
                self._capture(batch, pool, context.stream)
        rows.load([])

    def _size(self, batch: int) -> int:
        return next(size for size in self.batch_sizes if size >= batch)

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """A round over these rows, which DraftRows was loaded with, begins."""
        self._steps[self._size(len(rows))].plan(rows)

    def replay(self, batch: int) -> torch.Tensor:
        """Run a step of the first `batch` rows. Returns logits [>= batch, vocab], which the next
        replay of these graphs, or of others with the same `logits`, overwrites."""
        assert self.logits is not None
        self._graphs[self._size(batch)].replay()
        return self.logits

    def time_empty_step(self) -> float:
        """Seconds of a step of one row without context: the model's weights, and launches."""
        begin = 0.0
        for _ in range(TIMED_STEPS):
            self._rows.load([])
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.replay(1)
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _capture(self, batch: int, pool: Any, stream: torch.cuda.Stream) -> None:
        rows, attention = self._rows, self._attention
        forward_batch = self._forward_batch(batch)
        model = self._runner.model

        def step() -> torch.Tensor:
            set_dp_buffer_len(None, batch, forward_batch.dp_padding_mode.is_max_len(), None)
            set_is_extend_in_batch(False)
            rows.begin_step(batch)
            output = model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
            logits: torch.Tensor = output.next_token_logits
            rows.end_step(logits)
            return logits

        attended = self._make_attention(rows, batch)
        attended.plan([])
        self._steps[batch] = attended
        self._kept.append(forward_batch)
        attention.begin_steps(rows, attended)
        try:
            with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
                for _ in range(WARM_UPS):
                    rows.load([])
                    torch.cuda.synchronize()
                    self._runner.tp_group.barrier()
                    logits = step()
                if self.logits is None:
                    self.logits = logits.new_empty(rows.max_batch, logits.shape[1])
                del logits
                torch.cuda.synchronize()
                self._runner.tp_group.barrier()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    self.logits[:batch].copy_(step())
                self._graphs[batch] = graph
        finally:
            attention.end_steps()

    def _forward_batch(self, batch: int) -> ForwardBatch:
        """What models read of a decode batch; where KV lies is the attention backend's to know."""
        device = self._rows.device
        ones = torch.ones(batch, dtype=torch.int64, device=device)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=batch,
            input_ids=self._rows.input_ids[:batch],
            req_pool_indices=torch.zeros_like(ones),
            seq_lens=ones,
            seq_lens_cpu=ones.cpu(),
            out_cache_loc=torch.zeros_like(ones),
            seq_lens_sum=batch,
            orig_seq_lens=ones,
            positions=self._rows.positions[:batch],
            spec_algorithm=self._runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            dp_padding_mode=DpPaddingMode.get_default_mode_in_cuda_graph(),
            global_forward_mode=ForwardMode.DECODE,
        )
