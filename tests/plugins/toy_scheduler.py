"""A verify scheduler of another package: each request drafts up to four tokens, and all requests
verify in every round, whatever drafts and rounds cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sglang_kvspec.engine.ports import SchedulerParts
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.planning.round_plan import RoundBudget
from sglang_kvspec.runtime.request_state import RequestState

DRAFT_LEN = 4
# Residual pages that the link may move in a round, at most half of them before the verifications.
ROUND_PAGES = 8


class FixedLengths:
    """Schedule that is the same on every rank, since no measured number goes into it."""

    piggybacks_sampled = False
    link_share = None

    def __init__(self, parts: SchedulerParts) -> None:
        self._most = min(parts.config.max_draft_len, DRAFT_LEN)

    def plan(
        self,
        states: Sequence[RequestState],
        late: Collection[int] = (),
        num_drafts: Sequence[int] | None = None,
    ) -> RoundSchedule:
        have = [len(state.drafts) for state in states] if num_drafts is None else num_drafts
        caps = [state.cap_len(self._most) for state in states]
        lens = [max(cap - count, 0) for cap, count in zip(caps, have, strict=True)]
        return RoundSchedule(lens, RoundBudget(ROUND_PAGES // 2, ROUND_PAGES))

    def piggybacks(self, state: RequestState, num_drafts: int) -> bool:
        return False

    def seconds_to_next(
        self, states: Sequence[RequestState], schedule: RoundSchedule | None
    ) -> list[float]:
        return [0.0] * len(states)
