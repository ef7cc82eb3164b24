"""Captured steps over DraftRows at the target precision, compared with the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvspec_kernels.ops.capture import captured_graph
from kvspec_testkit.runtime.attention_pair import AttentionPair
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.draft_rows import DraftRows, target_row
from sglang_kvspec.runtime.step_attention import StepAttention


class CapturedSteps:
    """All layers of a pair's attention for one batch size. Captured on a GPU; on a CPU run eagerly
    from the same tensors."""

    def __init__(
        self,
        pair: AttentionPair,
        batch: int,
        make_attention: Callable[[DraftRows, int], StepAttention],
        *,
        max_steps: int = 8,
        max_pages: int = 8,
    ) -> None:
        """max_steps: most steps of a round. max_pages: most pages of a request."""
        geometry, device = pair.geometry, pair.kv.device
        self._pair, self._batch = pair, batch
        self._rows = DraftRows(batch, max_steps, max_pages, geometry.page_size, device)
        self._attended = make_attention(self._rows, batch)
        heads = (pair.num_qo_heads, geometry.num_kv_heads, geometry.num_kv_heads)
        self._inputs = [
            torch.zeros(
                (geometry.num_layers, batch, n, geometry.head_dim),
                dtype=geometry.dtype,
                device=device,
            )
            for n in heads
        ]
        self._outs = torch.empty_like(self._inputs[0])
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._attended.plan([])
            self._rows.clear()
            self._run()
            with captured_graph() as self._graph:
                self._run()

    def _run(self) -> None:
        pair = self._pair
        pair.attention.begin_steps(self._rows, self._attended)
        self._rows.begin_step(self._batch)
        for layer in range(pair.geometry.num_layers):
            q, k, v = (part[layer] for part in self._inputs)
            scale = pair.geometry.head_dim**-0.5
            self._outs[layer] = pair.attention.forward(layer, q, k, v, scale)
        self._rows.end_step(torch.zeros(self._batch, 10, device=pair.kv.device))
        pair.attention.end_captured()

    def advance(self, **lengths: int) -> None:
        """Let each request take lengths[name] tokens, and commit them. Compares every step."""
        pair = self._pair
        lens = dict(sorted(lengths.items(), key=lambda item: -item[1]))
        starts = {name: pair.committed[name] for name in lens}
        ids = {name: pair.page_ids(name, starts[name] + n) for name, n in lens.items()}
        loaded = [target_row(pair.kv, 0, starts[name], ids[name], n) for name, n in lens.items()]
        self._rows.load(loaded)
        self._attended.plan(loaded)
        for step in range(max(lens.values())):
            going = [name for name, n in lens.items() if n > step]
            self._step([Row(RowKind.VERIFY, starts[name] + step, 1, ids[name]) for name in going])
        rows = {name: Row(RowKind.VERIFY, starts[name], n, ids[name]) for name, n in lens.items()}
        pair.commit(rows, lens)

    def _step(self, rows: list[Row]) -> None:
        """Take one token of each of these rows, the first of the batch, and compare both sides."""
        pair = self._pair
        drawn = [pair.draw(self._batch) for _ in range(pair.geometry.num_layers)]
        for layer, parts in enumerate(drawn):
            for place, part in zip(self._inputs, parts, strict=True):
                place[layer] = part.to(place.device)
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        with pair.reference.planned(ForwardPlan(tuple(rows))):
            for layer, parts in enumerate(drawn):
                q, k, v = (part[: len(rows)] for part in parts)
                want = pair.reference.forward(layer, q, k, v, pair.geometry.head_dim**-0.5)
                pair.compare(self._outs[layer, : len(rows)], want)
