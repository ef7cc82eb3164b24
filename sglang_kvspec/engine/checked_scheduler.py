"""Guard of the engine against verify schedulers of other packages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sglang_kvspec.core.errors import SchedulerError
from sglang_kvspec.engine.ports import VerifyScheduler
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.planning.link_rounds import LinkShare
from sglang_kvspec.runtime.request_state import RequestState


class CheckedScheduler:
    """Scheduler that raises SchedulerError where a plan of `inner` violates the protocol."""

    def __init__(self, name: str, inner: VerifyScheduler, max_draft_len: int) -> None:
        self._name, self._inner, self._max_draft_len = name, inner, max_draft_len
        self.piggybacks_sampled = inner.piggybacks_sampled

    @property
    def link_share(self) -> LinkShare | None:
        """Link share of `inner`. See VerifyScheduler.link_share."""
        return self._inner.link_share

    def plan(
        self,
        states: Sequence[RequestState],
        late: Collection[int] = (),
        num_drafts: Sequence[int] | None = None,
    ) -> RoundSchedule:
        """Plan with `inner`, and check the schedule. See VerifyScheduler.plan."""
        schedule = self._inner.plan(states, late, num_drafts)
        have = [len(state.drafts) for state in states] if num_drafts is None else num_drafts
        self._check_lens(schedule.lens, states, have)
        if schedule.alone:
            self._check_lens(schedule.alone, states, have)
        unknown = sorted(schedule.held - set(range(len(states))))
        if unknown:
            raise self._error(
                f"held the request at index {unknown[0]} of a batch of {len(states)} requests"
            )
        budget = schedule.budget
        if not 0 <= budget.drafting_pages <= budget.round_pages:
            raise self._error(
                f"planned {budget.drafting_pages} residual pages for the draft steps of a round "
                f"(allowed: 0 to the {budget.round_pages} pages of the whole round)"
            )
        return schedule

    def piggybacks(self, state: RequestState, num_drafts: int) -> bool:
        """Ask `inner`, and check the room for a draft. See VerifyScheduler.piggybacks."""
        wants = self._inner.piggybacks(state, num_drafts)
        if wants:
            self._check_room(state, num_drafts, 1)
        return wants

    def seconds_to_next(
        self, states: Sequence[RequestState], schedule: RoundSchedule | None
    ) -> list[float]:
        """Ask `inner`, and check the number of times. See VerifyScheduler.seconds_to_next."""
        seconds = self._inner.seconds_to_next(states, schedule)
        if len(seconds) != len(states):
            raise self._error(
                f"returned {len(seconds)} times for a batch of {len(states)} requests"
            )
        return seconds

    def _check_lens(
        self, lens: Sequence[int], states: Sequence[RequestState], have: Sequence[int]
    ) -> None:
        if len(lens) != len(states):
            raise self._error(
                f"returned {len(lens)} draft lengths for a batch of {len(states)} requests"
            )
        for state, count, more in zip(states, have, lens, strict=True):
            if more:
                self._check_room(state, count, more)

    def _check_room(self, state: RequestState, num_drafts: int, more: int) -> None:
        room = max(state.cap_len(self._max_draft_len) - num_drafts, 0)
        if not 0 <= more <= room:
            raise self._error(
                f"planned {more} more drafts for request {state.rid} (allowed: 0 to {room})"
            )

    def _error(self, what: str) -> SchedulerError:
        return SchedulerError(f"--kvspec-schedule {self._name} {what}")
