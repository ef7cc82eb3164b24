"""Schedules to compare the staggered one with: plain decoding, lock-step and sequential.

In lock-step and sequential verification (VeriCache section 4.2.1), the link is idle while requests
draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil

from planner.simulation import Machine, RunningRequest, Schedule, Step
from planner.traces import TraceRequest
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.residency import ResidencyView, choose_resident


class PlainDecoding(Schedule):
    """Schedule with full-precision KV in HBM, and one token per request and iteration."""

    def has_room(self, request: TraceRequest) -> bool:
        if len(self.running) >= self.machine.max_requests:
            return False
        return self._held_bytes() + self._bytes_of(request) <= self.machine.kv_bytes

    def step(self) -> Step:
        kv_tokens = sum(r.context_len for r in self.running)
        seconds = self.machine.costs.plain_seconds(len(self.running), kv_tokens)
        tokens = sum(request.emit(1) for request in self.running)
        return Step(seconds, tokens, held_bytes=self._held_bytes())

    def _held_bytes(self) -> float:
        return sum(self._bytes_of(r.trace) for r in self.running)

    def _bytes_of(self, request: TraceRequest) -> float:
        return request.total_len * self.machine.plain_bytes


class Drafting(Schedule):
    """Common part of schedules that draft: memory, residency and the costs of rows.

    A schedule does not know where an output ends. Drafts past the end are made and verified in
    vain.
    """

    def __init__(self, machine: Machine, draft_len: int, num_requests: int, rooms: int = 1) -> None:
        """Create a schedule without requests. num_requests: most requests that run at once. rooms:
        number of fetches of the largest request that HBM keeps free, unless all residuals stay."""
        super().__init__(machine)
        if not 1 <= draft_len <= machine.max_draft_len:
            raise ConfigError(f"draft_len must be 1..{machine.max_draft_len}, got {draft_len}")
        self.draft_len = draft_len
        self.num_requests = min(num_requests, machine.max_requests)
        self.rooms = max(rooms, 1)
        self._to_keep: frozenset[int] = frozenset()
        # Cached until requests or residents change.
        self._steady_bytes: float | None = None

    def has_room(self, request: TraceRequest) -> bool:
        if len(self.running) >= self.num_requests:
            return False
        traces = [*(r.trace for r in self.running), request]
        residuals = [self.residual_bytes(trace) for trace in traces]
        always = sum(self.always_bytes(trace) for trace in traces)
        return always + self.fetch_room(residuals) <= self.machine.kv_bytes

    def fetch_room(self, residuals: list[int]) -> int:
        return min(self.rooms * max(residuals, default=0), sum(residuals))

    def join(self, request: RunningRequest) -> None:
        """Add a request. Its residuals are created in HBM, so it is resident at first. The choice
        of residents may evict it at once."""
        super().join(request)
        request.is_resident = True
        self._steady_bytes = None
        self.choose_residents()

    def leave(self, request: RunningRequest) -> None:
        super().leave(request)
        self._steady_bytes = None
        self.choose_residents()

    def always_bytes(self, request: TraceRequest) -> float:
        return request.total_len * self.machine.anchor_bytes + self.machine.window_bytes

    def residual_bytes(self, request: TraceRequest) -> int:
        return ceil(request.total_len * self.machine.residual_bytes)

    def fetch_bytes(self, request: RunningRequest) -> int:
        return 0 if request.is_resident else ceil(request.context_len * self.machine.residual_bytes)

    def steady_bytes(self) -> float:
        """Return the bytes of HBM in use that do not depend on current verifications."""
        if self._steady_bytes is None:
            resident = sum(self.residual_bytes(r.trace) for r in self.running if r.is_resident)
            always = sum(self.always_bytes(r.trace) for r in self.running)
            self._steady_bytes = always + resident
        return self._steady_bytes

    def next_use(self, request: RunningRequest) -> int:
        return max(self.draft_len - request.num_drafts, 0)

    def choose_residents(self) -> None:
        """Choose the resident requests, and evict the others at once. A newly chosen request keeps
        the residuals that its next verification fetches."""
        views = [
            ResidencyView(
                request.request_id,
                self.residual_bytes(request.trace),
                self.next_use(request),
                self.draft_len + 1,
                request.is_resident,
            )
            for request in self.running
        ]
        spare = int(self.machine.kv_bytes - sum(self.always_bytes(r.trace) for r in self.running))
        residuals = [view.residual_bytes for view in views]
        if sum(residuals) > spare:
            spare -= self.fetch_room(residuals)
        self._to_keep = choose_resident(views, spare)
        for request in self.running:
            if request.is_resident and not self.keeps(request):
                self.evict(request)

    def keeps(self, request: RunningRequest) -> bool:
        return request.request_id in self._to_keep

    def evict(self, request: RunningRequest) -> None:
        request.is_resident = False
        self._steady_bytes = None

    def seconds(
        self, drafting: Iterable[RunningRequest], verifying: Iterable[RunningRequest]
    ) -> float:
        drafting, verifying = list(drafting), list(verifying)
        return self.machine.costs.seconds(
            num_draft_rows=len(drafting),
            draft_kv_tokens=sum(r.context_len for r in drafting),
            num_verify_rows=len(verifying),
            verify_query_tokens=sum(r.num_drafts + 1 for r in verifying),
            verify_kv_tokens=sum(r.context_len for r in verifying),
        )

    def verify(self, request: RunningRequest) -> float:
        """Verify the drafts of a request. Return the tokens emitted."""
        if request.is_resident != self.keeps(request):
            request.is_resident = self.keeps(request)
            self._steady_bytes = None
        tokens = request.emit(self.machine.curve.expected_tokens(request.num_drafts))
        request.num_drafts = 0
        return tokens


class LockStep(Drafting):
    """Schedule in which all requests draft, then all verify, group by group. A group is as many
    requests as fit HBM together. Its residuals are fetched before it verifies."""

    def step(self) -> Step:
        drafting = [r for r in self.running if r.num_drafts < self.draft_len]
        if drafting:
            seconds = self.seconds(drafting, ())
            for request in drafting:
                request.num_drafts += 1
            return Step(seconds, 0.0, held_bytes=self.steady_bytes())
        seconds = stall_s = tokens = moved = held = 0.0
        for group in self.groups():
            num_bytes = sum(self.fetch_bytes(r) for r in group)
            transfer_s = num_bytes / self.machine.link_bytes_per_s
            seconds += transfer_s + self.seconds((), group)
            stall_s += transfer_s
            moved += num_bytes
            held = max(held, self.steady_bytes() + num_bytes)
            tokens += sum(self.verify(request) for request in group)
        return Step(seconds, tokens, stall_s, moved, held)

    def groups(self) -> Iterator[list[RunningRequest]]:
        """Yield the groups that verify together. Residents are in the first group."""
        kept = sum(self.residual_bytes(r.trace) for r in self.running if self.keeps(r))
        room = self.machine.kv_bytes - kept - sum(self.always_bytes(r.trace) for r in self.running)
        group: list[RunningRequest] = []
        taken = 0
        for request in sorted(self.running, key=lambda r: (not r.is_resident, r.request_id)):
            num_bytes = self.fetch_bytes(request)
            if group and taken + num_bytes > room:
                yield group
                group, taken = [], 0
            group.append(request)
            taken += num_bytes
        yield group


class Sequential(LockStep):
    """Schedule in which all requests draft, then residents verify together, then the others fetch
    and verify one by one."""

    def groups(self) -> Iterator[list[RunningRequest]]:
        if residents := [r for r in self.running if r.is_resident]:
            yield residents
        yield from ([r] for r in self.running if not r.is_resident)
