"""Captured verifications over VerifyRows, compared with the reference."""

from __future__ import annotations

import torch

from kvspec_kernels.ops.capture import captured_graph
from kvspec_testkit.runtime.attention_pair import AttentionPair
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.kv.transfers import send_into
from sglang_kvspec.runtime.draft_rows import draft_row, open_for_drafts
from sglang_kvspec.runtime.piggyback_rows import PiggybackRows
from sglang_kvspec.runtime.target_attention import CapturedTarget
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize


class CapturedVerification:
    """All layers of a pair's attention for one size. Captured on a GPU; on a CPU run eagerly from
    the same tensors."""

    def __init__(
        self,
        pair: AttentionPair,
        rows: VerifyRows,
        attended: CapturedTarget,
        size: VerifySize,
        piggyback: PiggybackRows | None = None,
    ) -> None:
        """piggyback: rows made over `rows`, if other requests may draft in the same forward."""
        self._piggyback = piggyback
        # Number of draft rows in front of the verified tokens.
        self._front = 0
        if piggyback is not None:
            self._front = piggyback.drafts.max_batch
            self._step = pair.attention.make_draft_step(piggyback.drafts, self._front)
            piggyback.clear()
        self._pair, self._rows, self._attended, self._size = pair, rows, attended, size
        geometry, device = pair.geometry, pair.kv.device
        heads = (pair.num_qo_heads, geometry.num_kv_heads, geometry.num_kv_heads)
        num_tokens = self._front + size.num_tokens
        shapes = [(geometry.num_layers, num_tokens, n, geometry.head_dim) for n in heads]
        # Tokens that no request loads keep this value.
        self._inputs = [
            torch.full(shape, 7.0, dtype=geometry.dtype, device=device) for shape in shapes
        ]
        self._outs = torch.empty_like(self._inputs[0])
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            rows.clear()
            self._run()
            with captured_graph() as self._graph:
                self._run()

    def _run(self) -> None:
        attention = self._pair.attention
        piggyback, device = self._piggyback, self._pair.kv.device
        num_tokens = self._front + self._size.num_tokens
        if piggyback is None:
            attention.begin_verification(self._rows, self._attended)
        else:
            attention.begin_piggyback(piggyback.drafts, self._step, self._rows, self._attended)
            piggyback.begin_step(num_tokens)
        scale = self._pair.geometry.head_dim**-0.5
        for layer in range(self._pair.geometry.num_layers):
            q, k, v = (part[layer] for part in self._inputs)
            self._outs[layer] = attention.forward(layer, q, k, v, scale)
        if piggyback is not None:
            piggyback.end_step(torch.zeros(num_tokens, 10, device=device))
        attention.end_captured()

    def _replay(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def run_cleared(self) -> None:
        """Run without any token to verify, and assert that all outputs of `rows` are 0."""
        self._rows.clear()
        self._replay()
        assert not self._outs[:, self._front :].any(), "outputs of rows without a token are not 0"

    def verify(
        self,
        accepted: dict[str, int] | None = None,
        piggyback: dict[str, int] | None = None,
        **lengths: int,
    ) -> None:
        """Verify like AttentionPair.verify. piggyback: number of drafts that some other requests
        have; each of these makes one piggyback draft after them."""
        pair = self._pair
        rows = pair.verify_rows(lengths)
        drafts = self._draft_rows(piggyback or {})
        for row in drafts:
            open_for_drafts(pair.kv, row.start, row.pages, 1)
        plan = ForwardPlan(tuple(rows.values()))
        count, layers = plan.num_tokens, pair.geometry.num_layers
        drawn = [pair.draw(count + len(drafts)) for _ in range(layers)]
        front = self._front
        with pair.attention.laid_out(plan) as opened:
            tokens = list(range(count))
            values = self._rows.values_of(opened, tokens, tokens)
            if self._piggyback is not None:
                loaded = [draft_row(pair.kv, 0, row.start, row.pages, 1) for row in drafts]
                values += self._piggyback.drafts.values_of(loaded)
                self._piggyback.drafts.begin_round()
            send_into(values)
            self._attended.plan(opened)
            for layer, parts in enumerate(drawn):
                for place, part in zip(self._inputs, parts, strict=True):
                    place[layer, front : front + count] = part[:count].to(place.device)
                    place[layer, : len(drafts)] = part[count:].to(place.device)
            self._replay()
        scale = pair.geometry.head_dim**-0.5
        with pair.reference.planned(ForwardPlan((*plan.rows, *drafts))):
            for layer, parts in enumerate(drawn):
                outs, want = self._outs[layer], pair.reference.forward(layer, *parts, scale)
                pair.compare(outs[front : front + count], want[:count])
                if drafts:
                    pair.compare(outs[: len(drafts)], want[count:])
        assert not self._outs[:, front + count :].any(), "outputs of rows without a token are not 0"
        pair.commit(rows, lengths | (accepted or {}))

    def _draft_rows(self, done: dict[str, int]) -> list[Row]:
        pair = self._pair
        starts = {name: pair.committed[name] + count for name, count in done.items()}
        return [
            Row(RowKind.DRAFT, start, 1, pair.page_ids(name, start + 2))
            for name, start in starts.items()
        ]
