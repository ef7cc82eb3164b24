"""Verifications over VerifyRows, as a CUDA graph holds them, beside the reference."""

from __future__ import annotations

import torch

from sglang_kvspec.runtime.forward_plan import ForwardPlan
from sglang_kvspec.runtime.testing.attention_pair import AttentionPair
from sglang_kvspec.runtime.verify_attention import CapturedTarget
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize


class CapturedVerification:
    """All layers of a pair's attention for one size: captured where there is a GPU, and run from
    the same tensors where there is none."""

    def __init__(
        self, pair: AttentionPair, rows: VerifyRows, attended: CapturedTarget, size: VerifySize
    ) -> None:
        self._pair, self._rows, self._attended, self._size = pair, rows, attended, size
        geometry, device = pair.geometry, pair.kv.device
        heads = (pair.num_qo_heads, geometry.num_kv_heads, geometry.num_kv_heads)
        shapes = [(geometry.num_layers, size.num_tokens, n, geometry.head_dim) for n in heads]
        # What tokens have that nobody loaded.
        self._inputs = [
            torch.full(shape, 7.0, dtype=geometry.dtype, device=device) for shape in shapes
        ]
        self._outs = torch.empty_like(self._inputs[0])
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            rows.clear()
            self._run()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._run()

    def _run(self) -> None:
        attention = self._pair.attention
        attention.begin_verification(self._rows, self._attended)
        scale = self._pair.geometry.head_dim**-0.5
        for layer in range(self._pair.geometry.num_layers):
            q, k, v = (part[layer] for part in self._inputs)
            self._outs[layer] = attention.forward(layer, q, k, v, scale)
        attention.end_captured()

    def _replay(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def run_cleared(self) -> None:
        """Without any token."""
        self._rows.clear()
        self._replay()
        assert not self._outs.any(), "tokens of nobody are not 0"

    def verify(self, accepted: dict[str, int] | None = None, **lengths: int) -> None:
        """As AttentionPair.verify."""
        pair = self._pair
        rows = pair.verify_rows(lengths)
        plan = ForwardPlan(tuple(rows.values()))
        count, layers = plan.num_tokens, pair.geometry.num_layers
        drawn = [pair.draw(count) for _ in range(layers)]
        opened = pair.attention.open(plan)
        tokens = list(range(count))
        self._rows.load(opened, tokens, tokens)
        self._attended.plan(opened)
        for layer, parts in enumerate(drawn):
            for place, part in zip(self._inputs, parts, strict=True):
                place[layer, :count] = part.to(place.device)
        self._replay()
        pair.attention.finish()
        pair.reference.begin(plan)
        scale = pair.geometry.head_dim**-0.5
        for layer, parts in enumerate(drawn):
            pair.compare(self._outs[layer, :count], pair.reference.forward(layer, *parts, scale))
        pair.reference.finish()
        assert not self._outs[:, count:].any(), "tokens of nobody are not 0"
        pair.commit(rows, lengths | (accepted or {}))
