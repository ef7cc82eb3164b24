"""How many drafts each request adds in a round, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kvspec.core.config import AUTO_DRAFT_LEN, KVSpecConfig
from sglang_kvspec.planning.round_clock import RoundClock
from sglang_kvspec.planning.round_step import RoundBudget
from sglang_kvspec.planning.rounds import RoundRequest, plan_round
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.round_stepper import RoundStepper

# Drafts of the first round, before anything was measured.
FIRST_DRAFT_LEN = 8


class RoundLengths:
    """By what `clock` measured of earlier rounds."""

    def __init__(
        self, config: KVSpecConfig, clock: RoundClock, stepper: RoundStepper, ranks: Ranks
    ) -> None:
        self._config, self._clock = config, clock
        self._stepper, self._ranks = stepper, ranks

    def plan(self, states: Sequence[RequestState]) -> tuple[list[int], RoundBudget]:
        """Drafts that each request adds to those it has, and what the link moves meanwhile."""
        caps = [state.cap_len(self._config.max_draft_len) for state in states]
        rooms = [cap - len(state.drafts) for state, cap in zip(states, caps, strict=True)]
        cost = self._clock.cost(mean_context(states))
        if self._config.draft_len != AUTO_DRAFT_LEN:
            lens = rooms
        elif not self._clock.has_measured:
            lens = [min(FIRST_DRAFT_LEN, room) for room in rooms]
        else:
            requests = [
                RoundRequest(
                    state.acceptance.probability,
                    cap,
                    len(state.drafts),
                    self._stepper.interval(state),
                )
                for state, cap in zip(states, caps, strict=True)
            ]
            lens = plan_round(requests, cost)
        budget = self._stepper.budget(lens, cost)
        # Ranks measure different times and must do the same.
        *lens, drafting_pages, round_pages = self._ranks.numbers(
            [*lens, budget.drafting_pages, budget.round_pages],
            about=[(state.rid, state.committed_len) for state in states],
        )
        return lens, RoundBudget(drafting_pages, round_pages)


def mean_context(states: Sequence[RequestState]) -> float:
    """Verified tokens of a request."""
    return sum(state.committed_len for state in states) / len(states)
