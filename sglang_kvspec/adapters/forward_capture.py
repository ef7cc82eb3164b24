"""CUDA-graph capture of the model's forward, over tensors whose addresses do not change."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvspec_kernels.ops.capture import captured_graph
from sglang_kvspec.adapters.compat.forward import ForwardBatch, ForwardContext, forward_context
from sglang_kvspec.adapters.compat.parallel_state import get_tp_group
from sglang_kvspec.adapters.decode_batch import decode_batch, run_model


class StaticRows(Protocol):
    """Tensors that captured forwards read, at fixed addresses. input_ids, positions: [max_tokens]
    int64."""

    device: torch.device
    input_ids: torch.Tensor
    positions: torch.Tensor

    def clear(self) -> None:
        """Remove all requests, so that a forward has no effect."""

    def begin_step(self, num_tokens: int) -> None:
        """Do the part of a graph that comes before the model."""

    def end_step(self, logits: torch.Tensor) -> None:
        """Do the part of a graph that comes after the model. logits: [num_tokens, vocab]."""


class ForwardCapture:
    """Maker of graphs that share memory and one logits tensor: never replay two of them at once.

    logits: [max_tokens, vocab], once something was captured.
    """

    def __init__(self, runner: Any, max_tokens: int, attn_backend: Any | None = None) -> None:
        """attn_backend: attention of these forwards, None for the runner's own."""
        self._runner, self._max_tokens = runner, max_tokens
        self._attn_backend = attn_backend
        self._pool = torch.cuda.graph_pool_handle()
        # One tensor for all graphs: separate outputs of many sizes would take gigabytes.
        self.logits: torch.Tensor | None = None
        # A graph holds addresses only: the tensors there must live as long as the graph.
        self._kept: list[ForwardBatch] = []

    @property
    def attn_backend(self) -> Any:
        # SGLang makes the runner's after the worker: it is not there yet when texts are written.
        return self._runner.attn_backend if self._attn_backend is None else self._attn_backend

    def capture(
        self, rows: StaticRows, num_tokens: int, stream: torch.cuda.Stream, warm_ups: int
    ) -> torch.cuda.CUDAGraph:
        """Capture the forward of the first num_tokens tokens of `rows`, with the attention that was
        begun. Its logits go to the first rows of self.logits."""
        runner = self._runner
        batch = decode_batch(runner, rows.input_ids[:num_tokens], rows.positions[:num_tokens])
        self._kept.append(batch)

        def step() -> torch.Tensor:
            rows.begin_step(num_tokens)
            logits = run_model(runner, batch)
            rows.end_step(logits)
            return logits

        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            for _ in range(warm_ups):
                rows.clear()
                torch.cuda.synchronize()
                get_tp_group().barrier()
                logits = step()
            if self.logits is None:
                self.logits = logits.new_empty(self._max_tokens, logits.shape[1])
            del logits
            torch.cuda.synchronize()
            get_tp_group().barrier()
            with captured_graph(pool=self._pool, stream=stream) as graph:
                self.logits[:num_tokens].copy_(step())
        return graph
