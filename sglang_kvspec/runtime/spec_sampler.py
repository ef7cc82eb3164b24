"""Selection of tokens from logits: the first token, drafts, and the tokens of a verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_kvspec.runtime.acceptance import accept_by_rejection, accept_matching, draw
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import (
    SamplingParams,
    adjust_logits,
    choose_with_noise,
    distribution,
    num_sound_rows,
)


class VerifyResult(NamedTuple):
    """Result of a verification, or of a prefill. tokens: emitted tokens; empty if the first row of
    logits allows no choice. logits: [>= len(tokens), vocab] fp32, the target that each token was
    chosen from, for log-probabilities; None if no request asks for them."""

    tokens: list[int]
    logits: torch.Tensor | None


class SpecSampler:
    """Sampler with one generator for all requests without a seed of their own.

    Greedy requests take the most likely token. Seeded requests use noise fixed by seed and
    position, so that they repeat themselves. All others are verified by speculative rejection
    sampling. A row without a finite largest logit (NaN, inf, or every token masked) ends a
    verification before it. If it is the first row, nothing is emitted and the request cannot
    continue.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def first(
        self,
        logits: torch.Tensor,
        params: SamplingParams,
        output: Sequence[int],
        position: int,
        mask: torch.Tensor | None,
    ) -> VerifyResult:
        """Return the token at `position`, from the logits [1, vocab] of a prefill's last token."""
        logits = adjust_logits(logits, params, output, (), mask)
        if not num_sound_rows(logits, params):
            return VerifyResult([], logits)
        return VerifyResult([self._choose(logits, params, position)[0]], logits)

    def draft(self, state: RequestState, logits: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Append one draft to `state` from the logits [1, vocab] of its last token."""
        params = state.params
        output = [*state.output, *state.drafts] if params.depends_on_output else ()
        logits = adjust_logits(logits, params, output, (), mask)
        if not num_sound_rows(logits, params):
            # Verification rejects any draft here. Token 0 alone makes a valid distribution.
            logits = torch.full_like(logits, float("-inf"))
            logits[:, 0] = 0
        token, probs = self._choose(logits, params, state.next_position + 1)
        state.drafts.append(token)
        if probs is not None:
            state.draft_probs.append(probs)

    def draft_top1(self, states: Sequence[RequestState], logits: torch.Tensor) -> None:
        """Append the most likely token of logits [num_states, vocab] to each greedy state. Where
        logits hold NaN, verification rejects every draft."""
        for state, token in zip(states, logits.argmax(-1).tolist(), strict=True):
            state.drafts.append(token)

    def verify(
        self, state: RequestState, logits: torch.Tensor, masks: torch.Tensor | None
    ) -> VerifyResult:
        """Apply the accept rule to the drafts of `state`, by target logits [num_drafts + 1, vocab].
        Does not commit."""
        params = state.params
        logits = adjust_logits(logits, params, state.output, state.drafts, masks)
        num_sound = num_sound_rows(logits, params)
        if not num_sound:
            return VerifyResult([], logits)
        sound, drafts = logits[:num_sound], state.drafts[: num_sound - 1]
        if params.is_greedy:
            return VerifyResult(accept_matching(drafts, sound.argmax(-1).tolist()), logits)
        probs = distribution(sound, params)
        if params.seed is not None:
            targets = choose_with_noise(probs, params.seed, state.committed_len + 1)
            return VerifyResult(accept_matching(drafts, targets), logits)
        draft_probs = state.draft_probs[: num_sound - 1]
        return VerifyResult(
            accept_by_rejection(drafts, draft_probs, probs, self._generator), logits
        )

    @staticmethod
    def judge(state: RequestState, targets: Sequence[int], num_sound: int) -> list[int]:
        """Return the tokens of a verification by the target's most likely tokens, `targets`
        [num_drafts + 1].

        num_sound: number of rows before the first without a finite largest logit.
        """
        assert len(targets) == len(state.drafts) + 1
        if not num_sound:
            return []
        return accept_matching(state.drafts[: num_sound - 1], targets[:num_sound])

    def _choose(
        self, logits: torch.Tensor, params: SamplingParams, position: int
    ) -> tuple[int, torch.Tensor | None]:
        """Return a token from adjusted logits [1, vocab], and the distribution that it was drawn
        from; None where rejection sampling does not need that."""
        if params.is_greedy:
            return int(logits[0].argmax()), None
        probs = distribution(logits, params)
        if params.seed is not None:
            return choose_with_noise(probs, params.seed, position)[0], None
        return draw(probs[0], self._generator), probs[0]
