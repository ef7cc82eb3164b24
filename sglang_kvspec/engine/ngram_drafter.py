"""Drafter with several drafts a forward, where n-grams propose what the model would draft."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.proposed_steps import ProposedSteps


class NgramDrafter:
    """Drafter that may propose tokens to every step, for a device that the CPU waits for anyway."""

    def __init__(self, proposed: ProposedSteps) -> None:
        self._proposed = proposed

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Append lens[i] drafts to the state of request i."""
        states, steps = batch.states, self._proposed
        goals = [len(state.drafts) + more for state, more in zip(states, lens, strict=True)]
        ngrams = {i: steps.follow(states[i]) for i, more in enumerate(lens) if more}
        steps.begin(batch, lens)
        while missing := {i: m for i in ngrams if (m := goals[i] - len(states[i].drafts)) > 0}:
            proposals = {}
            for i, left in missing.items():
                most = min(left - 1, steps.most_proposed(states[i], len(ngrams)))
                proposals[i] = ngrams[i].propose(states[i].drafts, most)
            steps.take(batch, proposals)
