"""Schedule `staggered`: some requests verify, all others piggyback one draft on the forward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from math import ceil

from sglang_kvspec.core.config import AUTO_DRAFT_LEN
from sglang_kvspec.engine.ports import SchedulerParts
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.planning.draft_length import best_draft_len
from sglang_kvspec.planning.link_rounds import LinkShare
from sglang_kvspec.planning.round_plan import RoundBudget
from sglang_kvspec.runtime.request_state import RequestState

# Most verifications in a round, relative to an even spread.
SLACK = 1.25
# Where streams are paced, a streamed request drafts and verifies for at most this many rounds per
# token that it emitted last, so that these tokens fill the time evenly.
ROUNDS_A_TOKEN = 1.3
# Most drafts that such a request verifies at once: all other streams wait for the verification.
MOST_STREAMED_DRAFTS = 6
# Best lengths that are remembered, by acceptance and cap: more than the requests that run at once.
MOST_REMEMBERED = 4096


class StaggeredScheduler:
    """Scheduler in which verifications take turns (VeriCache section 5).

    A request is due once it has its best number of drafts. An even share of the requests verifies
    in a round: by priority, then the most overdue ones. All others piggyback one draft, sampled
    requests too. Only a round in which no request can verify makes a draft step of its own.
    Residuals of a due request move while others verify. The residual planner lets the request draft
    on until its residuals are there, for a bounded number of rounds.
    """

    piggybacks_sampled = True
    link_share: LinkShare | None = None

    def __init__(self, parts: SchedulerParts) -> None:
        self._config = parts.config
        self._planner, self._ranks = parts.planner, parts.ranks
        # Search once between two verifications of a request: plan() and seconds_to_next() both ask.
        self._paying_len = lru_cache(MOST_REMEMBERED)(
            partial(best_draft_len, cost=parts.draft_cost)
        )

    def plan(
        self,
        states: Sequence[RequestState],
        late: Collection[int] = (),
        num_drafts: Sequence[int] | None = None,
    ) -> RoundSchedule:
        """Plan a round, see VerifyScheduler.plan."""
        have = [len(state.drafts) for state in states] if num_drafts is None else num_drafts
        best = [
            self._best_len(state, count, is_late=i in late)
            for i, (state, count) in enumerate(zip(states, have, strict=True))
        ]
        due = [i for i, count in enumerate(have) if i not in late and count >= best[i]]
        # Requests that verify often must not take the turns of requests that draft far.
        share = ceil(SLACK * sum(1 / (count + 1) for count in best))
        turn = sorted(due, key=lambda i: (-states[i].priority, best[i] - have[i]))[: max(share, 1)]
        alone = [int(self.piggybacks(s, n)) for s, n in zip(states, have, strict=True)]
        # Ranks may round probabilities differently, and measure different times: rank 0 decides.
        verifies = [int(i in turn) for i in range(len(states))]
        pages = self._planner.pages_in(self._planner.speeds.iteration_s)
        *verifies, pages = self._ranks.numbers(
            [*verifies, pages], about=[(s.rid, s.committed_len) for s in states]
        )
        return RoundSchedule(
            lens=[0] * len(states),
            # Copies for a verification of this round would have no draft step to hide behind.
            budget=RoundBudget(0, pages),
            held=frozenset(i for i, is_turn in enumerate(verifies) if not is_turn),
            may_advance=False,
            alone=alone,
        )

    def piggybacks(self, state: RequestState, num_drafts: int) -> bool:
        """Return True if the request has room for one more draft."""
        return num_drafts < state.cap_len(self._config.max_draft_len)

    def seconds_to_next(
        self, states: Sequence[RequestState], schedule: RoundSchedule | None
    ) -> list[float]:
        """Return the seconds that each request takes to draft and verify again."""
        round_s = self._planner.speeds.iteration_s
        return [(self._best_len(state, 0, is_late=False) + 1) * round_s for state in states]

    def _best_len(self, state: RequestState, num_drafts: int, *, is_late: bool) -> int:
        """Return the number of drafts that the request is to have when it verifies next."""
        cap = state.cap_len(self._config.max_draft_len)
        best = cap
        if self._config.draft_len == AUTO_DRAFT_LEN and cap:
            best = self._paying_len(state.acceptance.probability, cap)
            if state.is_streamed and self._config.stream == "paced":
                filling = ceil(ROUNDS_A_TOKEN * state.last_emitted) - 1
                best = min(best, max(filling, 0), MOST_STREAMED_DRAFTS)
        if state.has_waited and not is_late:
            # More drafts would only keep the user waiting (Lynx section 4.2).
            best = min(best, max(1, num_drafts))
            if state.tail:
                best = num_drafts
        return best
