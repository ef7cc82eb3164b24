"""Server in simulated time: requests of a trace join, take iterations, and leave.

A schedule (schedules.py) decides what an iteration does. A request joins with its context computed:
prefill costs every schedule the same and is left out, as in VeriCache's long-context evaluation
(section 8.1). Memory is reserved for a request's whole length at once, so that no request is
retracted. A verification emits as many tokens as the acceptance curve expects, so that runs differ
only by schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from planner.traces import TraceRequest
from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.planning.costs import Costs


class Curve(Protocol):
    def expected_tokens(self, draft_len: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """Simulated machine and model. kv_bytes: HBM left for KV. plain_bytes, anchor_bytes,
    residual_bytes: bytes of one token. window_bytes: bytes of a request's recent window."""

    costs: Costs
    curve: Curve
    kv_bytes: int
    link_bytes_per_s: float
    plain_bytes: float
    anchor_bytes: float
    residual_bytes: float
    window_bytes: int = 0
    max_requests: int = 256
    max_draft_len: int = 64


@dataclass(slots=True, eq=False)
class RunningRequest:
    request_id: int
    trace: TraceRequest
    emitted: float = 0.0
    num_drafts: int = 0
    is_resident: bool = False

    @property
    def context_len(self) -> int:
        return self.trace.prompt_len + int(self.emitted)

    @property
    def remaining(self) -> float:
        return self.trace.output_len - self.emitted

    @property
    def is_done(self) -> bool:
        # Sums of expected tokens have rounding errors.
        return self.remaining < 1e-6

    def emit(self, num_tokens: float) -> float:
        """Emit up to num_tokens. Return the number of them that the request still wanted."""
        wanted = min(num_tokens, self.remaining)
        self.emitted += wanted
        return wanted


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration. stall_s: time lost to waiting for residuals; where only some requests wait,
    their share of the time. moved_bytes: bytes moved over the link. held_bytes: most HBM in use."""

    seconds: float
    tokens: float
    stall_s: float = 0.0
    moved_bytes: float = 0.0
    held_bytes: float = 0.0


class Schedule(ABC):
    """Rule for what running requests do. A subclass decides which requests fit, and what an
    iteration does."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.running: list[RunningRequest] = []

    @abstractmethod
    def has_room(self, request: TraceRequest) -> bool: ...

    @abstractmethod
    def step(self) -> Step:
        """Advance all running requests, of which there is at least one. Must not remove requests
        that are done."""

    def join(self, request: RunningRequest) -> None:
        self.running.append(request)

    def leave(self, request: RunningRequest) -> None:
        self.running.remove(request)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums up to one moment. busy_s leaves out times without a request."""

    now_s: float = 0.0
    busy_s: float = 0.0
    stall_s: float = 0.0
    tokens: float = 0.0
    moved_bytes: float = 0.0

    def after(self, step: Step) -> Totals:
        return Totals(
            self.now_s + step.seconds,
            self.busy_s + step.seconds,
            self.stall_s + step.stall_s,
            self.tokens + step.tokens,
            self.moved_bytes + step.moved_bytes,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a whole run. progress: totals after every iteration."""

    num_requests: int
    peak_bytes: float
    progress: tuple[Totals, ...]

    @property
    def end(self) -> Totals:
        return self.progress[-1] if self.progress else Totals()

    def steady(self, first: float = 0.2, last: float = 0.8) -> Totals:
        """Return the totals between these shares of all tokens, without the times in which the
        server fills or runs empty. A run that is too short for that counts as a whole."""
        tokens = self.end.tokens
        inner = [t for t in self.progress if first * tokens <= t.tokens <= last * tokens]
        if len(inner) < 2:
            return self.end
        start, end = inner[0], inner[-1]
        return Totals(
            end.now_s - start.now_s,
            end.busy_s - start.busy_s,
            end.stall_s - start.stall_s,
            end.tokens - start.tokens,
            end.moved_bytes - start.moved_bytes,
        )

    def tokens_per_s(self) -> float:
        steady = self.steady()
        return steady.tokens / steady.busy_s if steady.busy_s else 0.0

    def stall_share(self) -> float:
        """Return the share of stalls in the time spent in iterations."""
        steady = self.steady()
        return steady.stall_s / steady.busy_s if steady.busy_s else 0.0

    def link_utilisation(self, link_bytes_per_s: float) -> float:
        """Return the bytes moved, as a share of the bytes that the link could have moved."""
        steady = self.steady()
        return steady.moved_bytes / (link_bytes_per_s * steady.busy_s) if steady.busy_s else 0.0


def simulate(schedule: Schedule, trace: Sequence[TraceRequest]) -> Report:
    """Run all of `trace`, first come, first served. Raises CapacityError for a request that does
    not fit an empty server."""
    pending = deque(enumerate(sorted(trace, key=lambda request: request.arrival_s)))
    totals, peak = Totals(), 0.0
    progress = []
    # True if the first of `pending` found no room beside the running requests.
    is_full = False
    while pending or schedule.running:
        arrived = totals.now_s
        while pending and pending[0][1].arrival_s <= arrived and not is_full:
            is_full = not schedule.has_room(pending[0][1])
            if not is_full:
                schedule.join(RunningRequest(*pending.popleft()))
        if not schedule.running:
            request = pending[0][1]
            if request.arrival_s <= arrived:
                raise CapacityError(f"{request} does not fit on an empty server")
            totals = replace(totals, now_s=request.arrival_s)
            continue
        step = schedule.step()
        totals = totals.after(step)
        peak = max(peak, step.held_bytes)
        progress.append(totals)
        if not step.tokens:
            continue
        for done in [r for r in schedule.running if r.is_done]:
            schedule.leave(done)
            is_full = False
    return Report(len(trace), peak, tuple(progress))
