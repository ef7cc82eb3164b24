"""CUDA graphs of one draft step, one a batch size."""

from __future__ import annotations

import time
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

from kvspec_kernels.ops.attention import DraftAttention
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftRows

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


class DraftGraphs:
    """The model's forward over DraftRows, captured."""

    def __init__(self, runner: Any, attention: DeviceAttention, rows: DraftRows) -> None:
        self._runner = runner
        self._attention = attention
        self._rows = rows
        self.batch_sizes = batch_sizes(rows.max_batch)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}
        # A graph knows addresses only: what lies there must live as long.
        self._kept: list[tuple[DraftAttention, ForwardBatch]] = []
        pool = torch.cuda.graph_pool_handle()
        with graph_capture() as context:
            # Large ones first: the small ones then fit in their memory.
            for batch in reversed(self.batch_sizes):
                self._capture(batch, pool, context.stream)
        rows.load([])

    def replay(self, batch: int) -> torch.Tensor:
        """Run a step of the first `batch` rows. Returns logits [>= batch, vocab], which the next
        replay overwrites."""
        size = next(size for size in self.batch_sizes if size >= batch)
        self._graphs[size].replay()
        return self._logits[size]

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

        drafter = attention.make_drafter(rows, batch)
        self._kept.append((drafter, forward_batch))
        attention.begin_draft(rows, drafter)
        try:
            with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
                for _ in range(WARM_UPS):
                    rows.load([])
                    torch.cuda.synchronize()
                    self._runner.tp_group.barrier()
                    step()
                torch.cuda.synchronize()
                self._runner.tp_group.barrier()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    self._logits[batch] = step()
                self._graphs[batch] = graph
        finally:
            attention.end_draft()

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
