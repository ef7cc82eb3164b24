"""A drafter of another package: the tokens that followed the last two tokens when they came last.

Prompt lookup, as far as a request's own output goes. It runs no model, so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine.batch import RoundBatch

GRAM = 2


class OutputLookup:
    """Drafts for requests that need no distribution of a draft."""

    def __init__(self, config: KVSpecConfig, vocab_size: int) -> None:
        pass

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        for state, most in zip(batch.states, lens, strict=True):
            if state.params.is_greedy or state.params.seed is not None:
                known = [*state.output, *state.drafts]
                state.drafts.extend(_followers(known)[:most])


def _followers(tokens: list[int]) -> list[int]:
    """Return what came after the last occurrence of the last GRAM tokens before the end."""
    gram = tokens[-GRAM:]
    for end in range(len(tokens) - 1, GRAM - 1, -1):
        if tokens[end - GRAM : end] == gram:
            return tokens[end:]
    return []
