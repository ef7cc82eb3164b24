"""Division of a trace into rounds (drafts, then a verification), or into steps of plain SGLang."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from serving.kernel_names import ATTENTION, MATRIX, only_verifies
from serving.trace import Gap, GpuEvent, TraceError, busy_us, gaps


class Phase(StrEnum):
    """Phase of a round. STEPS: CUDA-graph replays that are draft steps of KVSpec or decode steps of
    plain SGLang. REST: everything else, which is verification and housekeeping."""

    STEPS = "steps"
    REST = "rest"


@dataclass(frozen=True, slots=True)
class Round:
    """One round, from the first kernel of its first step to that of the next round.

    Times are in microseconds. steps_end_us: end of the last kernel of the last step. events: events
    that begin in the round, ordered by begin. steps: the graph replays that are steps.
    """

    begin_us: float
    steps_end_us: float
    end_us: float
    events: tuple[GpuEvent, ...]
    steps: frozenset[int]

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us

    @property
    def step_us(self) -> float:
        """Return the time of one step, gaps between steps included."""
        return (self.steps_end_us - self.begin_us) / len(self.steps)

    def phase_of(self, event: GpuEvent) -> Phase:
        return Phase.STEPS if event.replay in self.steps else Phase.REST

    def span(self, phase: Phase) -> tuple[float, float]:
        """Return begin and end of the phase, in microseconds."""
        if phase is Phase.STEPS:
            return self.begin_us, self.steps_end_us
        return self.steps_end_us, self.end_us

    def busy_us(self, phase: Phase) -> float:
        """Return the time of the phase in which any kernel runs."""
        return busy_us(self.events, *self.span(phase))

    def idle_us(self, phase: Phase) -> float:
        begin, end = self.span(phase)
        return end - begin - self.busy_us(phase)

    def gaps(self, phase: Phase) -> list[Gap]:
        return gaps(self.events, *self.span(phase), "the next round")

    def category_us(self) -> dict[tuple[Phase, str], float]:
        """Return the time of all kernels by phase and category. Kernels that run at the same time
        all count, so the sum may exceed the busy time."""
        found: defaultdict[tuple[Phase, str], float] = defaultdict(float)
        for event in self.events:
            found[self.phase_of(event), event.category] += event.us
        return dict(found)

    def kernels_us(self, phase: Phase, category: str) -> Counter[str]:
        """Return the time of each kernel by its whole name."""
        found: Counter[str] = Counter()
        for event in self.events:
            if event.category == category and self.phase_of(event) is phase:
                found[event.name] += event.us  # type: ignore[assignment]
        return found


def steady_rounds(events: Sequence[GpuEvent], *, drafting: bool) -> list[Round]:
    """Return the whole rounds of `events`, which are ordered by begin. The first round is left out,
    because the profiler starts in it.

    A round begins with the first step after a verification. On plain SGLang (drafting False), every
    replay is a round. Raises TraceError if there are no steps, or fewer than three rounds.
    """
    steps = _steps(events, drafting=drafting)
    if not steps:
        what = "draft step" if drafting else "decode step"
        raise TraceError(
            f"the trace has no {what}: no CUDA graph was replayed, so rounds cannot be told apart"
        )
    begins = _round_begins(events, steps, drafting=drafting)
    if len(begins) < 3:
        raise TraceError(
            f"the trace has {len(begins)} rounds, at least 3 are needed: the first and the last "
            "round do not count"
        )
    return [
        _round(events[first:end], events[end].begin_us, steps)
        for first, end in pairwise(begins[1:])
    ]


def _steps(events: Sequence[GpuEvent], *, drafting: bool) -> set[int]:
    replays = {event.replay for event in events if event.replay is not None}
    if not drafting:
        return replays
    # A verification may be a graph replay, too.
    return replays - {e.replay for e in events if e.replay is not None and only_verifies(e.name)}


def _round_begins(events: Sequence[GpuEvent], steps: set[int], *, drafting: bool) -> list[int]:
    """Return the indexes in `events` of the rounds' first kernels."""
    begins: list[int] = []
    last_step, verified = None, True
    for place, event in enumerate(events):
        if event.replay in steps:
            if verified if drafting else event.replay != last_step:
                begins.append(place)
            last_step, verified = event.replay, False
        elif event.category in (ATTENTION, MATRIX):
            # Copies may run between two draft steps, a forward of the model does not.
            verified = True
    return begins


def _round(events: Sequence[GpuEvent], end_us: float, steps: set[int]) -> Round:
    own = [event for event in events if event.replay in steps]
    return Round(
        begin_us=events[0].begin_us,
        steps_end_us=max(event.end_us for event in own),
        end_us=end_us,
        events=tuple(events),
        steps=frozenset(event.replay for event in own if event.replay is not None),
    )
