"""Schedule `rounds`: all requests draft, then verify together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sglang_kvspec.core.config import AUTO_DRAFT_LEN
from sglang_kvspec.engine.ports import SchedulerParts
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.planning.link_rounds import LinkShare, plan_turns, share_of_speed
from sglang_kvspec.planning.round_plan import RoundBudget
from sglang_kvspec.planning.rounds import RoundCost, RoundRequest, plan_round
from sglang_kvspec.runtime.request_state import RequestState

PPM = 1_000_000
# Drafts of the first round, before anything was measured.
FIRST_DRAFT_LEN = 8
# Drafts of the first round while a client reads a stream, where the time of a round is limited.
FIRST_STREAMED_LEN = 2
# Draft steps of a round for requests that cannot verify yet, where no other request wants more. The
# number is small, so that arriving residuals are soon noticed.
LATE_STEPS = 4


class RoundScheduler:
    """Scheduler of rounds: all requests draft, then all verify whose residuals can be there.

    draft_len auto: each round has the lengths with the most expected tokens a second, by every
    request's acceptance so far and by measured times of rounds. Greedy requests that do not verify
    piggyback a draft if its worth exceeds its price.
    """

    piggybacks_sampled = False

    def __init__(self, parts: SchedulerParts) -> None:
        self._config, self._clock, self._reads = parts.config, parts.round_costs, parts.reads
        self._planner, self._ranks = parts.planner, parts.ranks
        self._last: tuple[list[RoundRequest], RoundCost] | None = None
        # By the last plan: expected tokens that a draft must be worth, in millionths; most drafts.
        self._price_ppm = 0
        self._longest = parts.config.max_draft_len
        self._plain_steps, self._stream_round_s = parts.plain_steps, parts.stream_round_s
        self._most_auto_drafts = parts.most_auto_drafts
        self._last_lens: list[int] = []

    @property
    def link_share(self) -> LinkShare | None:
        """Speed that the link allows requests of the last round; None where nothing moves."""
        room = self._planner.room()
        return None if room is None or self._last is None else share_of_speed(*self._last, *room)

    def plan(
        self,
        states: Sequence[RequestState],
        late: Collection[int] = (),
        num_drafts: Sequence[int] | None = None,
    ) -> RoundSchedule:
        """Plan a round, see VerifyScheduler.plan. Late requests draft as long as the others, up to
        their caps, and do not influence how far the others draft."""
        have = [len(state.drafts) for state in states] if num_drafts is None else num_drafts
        turns = self._planner.turns()
        self._longest = self._config.max_draft_len
        if self._config.draft_len == AUTO_DRAFT_LEN and turns is None:
            # Nothing is fetched, so more drafts would not share the cost of a fetch.
            self._longest = min(self._longest, self._most_auto_drafts)
        caps = [
            self._cap(state, have[i], is_due=turns is None and i not in late)
            for i, state in enumerate(states)
        ]
        rooms = [max(cap - count, 0) for cap, count in zip(caps, have, strict=True)]
        price_ppm = 0
        cost = self._cost(states)
        if self._config.draft_len != AUTO_DRAFT_LEN:
            lens = rooms
        elif not self._clock.has_measured:
            lens = [min(FIRST_DRAFT_LEN, room) for room in rooms]
        else:
            ready = [i for i in range(len(states)) if i not in late]
            requests = [
                RoundRequest(states[i].acceptance.probability, caps[i], have[i]) for i in ready
            ]
            self._last = (requests, cost) if requests else None
            if turns:
                best, price = plan_turns(requests, cost, turns)
                price_ppm = round(price * PPM)
            else:
                best = plan_round(requests, cost)
            chosen = dict(zip(ready, best, strict=True))
            steps = max([LATE_STEPS, *chosen.values()])
            lens = [chosen.get(i, min(steps, room)) for i, room in enumerate(rooms)]
        if self._stream_round_s is not None and any(state.is_streamed for state in states):
            lens = self._shortened(lens, cost, self._stream_round_s)
        budget = self._planner.budget(lens, cost)
        # Ranks measure different times but must do the same: rank 0 decides.
        *lens, drafting_pages, round_pages, self._price_ppm = self._ranks.numbers(
            [*lens, budget.drafting_pages, budget.round_pages, price_ppm],
            about=[(state.rid, state.committed_len) for state in states],
        )
        self._last_lens = lens
        return RoundSchedule(lens, RoundBudget(drafting_pages, round_pages))

    def _shortened(self, lens: list[int], cost: RoundCost, most_s: float) -> list[int]:
        """Shorten lengths until the round takes most_s seconds at most, but not below one draft. A
        rejected draft leaves a stream without tokens until the end of the next round."""
        most = max(lens) if self._clock.has_measured else min(max(lens), FIRST_STREAMED_LEN)
        while most > 1 and cost.seconds([min(n, most) for n in lens]) > most_s:
            most -= 1
        return [min(n, most) for n in lens]

    def piggybacks(self, state: RequestState, num_drafts: int) -> bool:
        """Return True if one more draft is worth its price in the round that was planned last."""
        if num_drafts >= state.cap_len(self._longest):
            return False
        worth: float = state.acceptance.probability ** (num_drafts + 1)
        return worth * PPM > self._price_ppm

    def seconds_to_next(
        self, states: Sequence[RequestState], schedule: RoundSchedule | None
    ) -> list[float]:
        """Return the seconds of the next round, the same for all requests."""
        lens = self._last_lens if schedule is None else schedule.lens
        if len(lens) != len(states):
            return [0.0] * len(states)
        seconds = self._cost(states).seconds(lens)
        if not any(lens) and self._plain_steps:
            # A round without drafts takes this many steps.
            seconds *= self._plain_steps
        return [seconds] * len(states)

    def _cost(self, states: Sequence[RequestState]) -> RoundCost:
        return self._clock.cost(mean_context(states), self._reads.mean_tokens(states))

    def _cap(self, state: RequestState, num_drafts: int, *, is_due: bool) -> int:
        """Return the most drafts that the request may have at the end of the round. num_drafts: its
        drafts at the start. is_due: the request verifies at the end."""
        if is_due and state.has_waited and num_drafts:
            # More drafts would only keep the user waiting (Lynx section 4.2).
            return num_drafts
        return state.cap_len(self._longest)


def mean_context(states: Sequence[RequestState]) -> float:
    """Return the mean number of verified tokens of a request."""
    return sum([state.committed_len for state in states]) / len(states)
