"""Verification as one forward of the model, without a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import ModelForward, VerifyLogits
from sglang_kvspec.kv.forward_plan import Row
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens


@dataclass(frozen=True, slots=True)
class EagerVerify:
    """CapturedVerify without captures, which has room for every batch."""

    forward: ModelForward

    def run(
        self,
        batch: RoundBatch,
        rows: Mapping[int, Row],
        made: DraftedTokens | None,
        piggyback: Mapping[int, Row],
    ) -> VerifyLogits:
        """Run VERIFY rows, and DRAFT rows of other requests in the same forward."""
        logits = self.forward.run(batch, {**rows, **piggyback}, made)
        if not piggyback:
            return VerifyLogits(logits)
        num_tokens = sum(row.length for row in rows.values())
        behind = logits[num_tokens:]
        chosen = behind.argmax(-1)[None]
        drafted = DraftedTokens.of_one_step(chosen, list(piggyback), len(batch.states))
        return VerifyLogits(logits[:num_tokens], behind, drafted)
