"""Guard of the engine against drafters of other packages."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kvspec.core.errors import DrafterError
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import Drafter
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.request_state import RequestState


class CheckedDrafter:
    """Drafter that raises DrafterError where drafts of `inner` violate the protocol."""

    def __init__(self, name: str, inner: Drafter, vocab_size: int) -> None:
        self._name, self._inner, self._vocab_size = name, inner, vocab_size

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> DraftedTokens | None:
        """Draft with `inner`, and check the drafts. See Drafter.draft."""
        before = [len(state.drafts) for state in batch.states]
        made = self._inner.draft(batch, lens)
        for state, count, most in zip(batch.states, before, lens, strict=True):
            self._check(state, state.drafts[count:], 0 if made is not None else most)
        return made

    def _check(self, state: RequestState, drafts: Sequence[int], most: int) -> None:
        if len(drafts) > most:
            raise DrafterError(
                f"--kvspec-drafter {self._name} made {len(drafts)} drafts for request {state.rid} "
                f"(allowed: at most {most})"
            )
        wrong = [token for token in drafts if not 0 <= token < self._vocab_size]
        if wrong:
            raise DrafterError(
                f"--kvspec-drafter {self._name} drafted token {wrong[0]} for request {state.rid} "
                f"(allowed: 0 to {self._vocab_size - 1})"
            )
        is_sampled = not state.params.is_greedy and state.params.seed is None
        if drafts and is_sampled and len(state.draft_probs) != len(state.drafts):
            raise DrafterError(
                f"--kvspec-drafter {self._name} returned {len(state.draft_probs)} distributions "
                f"for {len(state.drafts)} drafts of sampled request {state.rid} (allowed: one for "
                "each draft)"
            )
