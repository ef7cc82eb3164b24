"""A drafter of another package. It drafts the tokens that followed the last occurrence of the last
two tokens.

This is prompt lookup, over a request's own output only. No model runs, so drafts cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine.batch import RoundBatch

GRAM = 2


class OutputLookup:
    """Drafter for requests that need no distribution of a draft: greedy and seeded ones."""

    def __init__(self, config: KVSpecConfig, vocab_size: int) -> None:
        pass

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        for state, most in zip(batch.states, lens, strict=True):
            if state.params.is_greedy or state.params.seed is not None:
                known = [*state.output, *state.drafts]
                state.drafts.extend(_followers(known)[:most])


def _followers(tokens: list[int]) -> list[int]:
    """Return the tokens that followed the last earlier occurrence of the last GRAM tokens."""
    gram = tokens[-GRAM:]
    for end in range(len(tokens) - 1, GRAM - 1, -1):
        if tokens[end - GRAM : end] == gram:
            return tokens[end:]
    return []
