"""Rounds of recorded requests, one batch after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_lengths.policies import Coming, Policy
from draft_lengths.traces import Trace
from sglang_kvspec.planning.draft_length import AcceptanceEstimate
from sglang_kvspec.planning.rounds import RoundCost

# Most plain steps in a round without drafts, as on a GPU server.
PLAIN_STEPS = 8


@dataclass(slots=True)
class Outcome:
    """Totals of simulated rounds."""

    rounds: int = 0
    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def add(self, other: Outcome) -> None:
        self.rounds += other.rounds
        self.steps += other.steps
        self.drafts += other.drafts
        self.accepted += other.accepted
        self.tokens += other.tokens
        self.seconds += other.seconds


@dataclass(slots=True)
class _Slot:
    """Place of a batch, in which requests are served in order. queue: requests to come. at: the
    pending token of the first."""

    queue: list[Trace]
    at: int
    estimate: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)

    def coming(self, signal: str) -> Coming:
        trace = self.queue[0]
        return Coming(
            self.estimate.probability,
            trace.draft_len,
            trace.accepted[self.at],
            trace.signals[signal][self.at],
        )

    def advance(self, num_tokens: int) -> None:
        self.at += num_tokens
        if self.at >= len(self.queue[0].accepted):
            self.queue.pop(0)
            self.at, self.estimate = 0, AcceptanceEstimate()


def simulate(
    traces: Sequence[Trace],
    num_slots: int,
    policy: Policy,
    cost: RoundCost,
    *,
    signal: str = "top",
    sync_s: float = 0.0,
) -> Outcome:
    """Serve requests in rounds of num_slots requests, which all wait for the longest, until a slot
    has served all of them. sync_s: seconds that each draft step takes longer, because the CPU reads
    its tokens.

    Each slot begins with another request. Where requests are fewer than slots, those of a second
    turn begin in the middle of theirs.
    """
    outcome, slots = Outcome(), _slots(traces, num_slots)
    while all(slot.queue for slot in slots):
        coming = [slot.coming(signal) for slot in slots]
        lens = policy.lens(coming)
        outcome.rounds += 1
        outcome.steps += max(lens)
        if not any(lens):
            for slot in slots:
                slot.estimate.observe(0, 0)
                slot.advance(PLAIN_STEPS)
            outcome.tokens += PLAIN_STEPS * num_slots
            outcome.seconds += PLAIN_STEPS * cost.seconds(lens)
            continue
        for slot, drafts, length in zip(slots, coming, lens, strict=True):
            accepted = min(drafts.accepted, length)
            slot.estimate.observe(length, accepted)
            slot.advance(accepted + 1)
            outcome.drafts += length
            outcome.accepted += accepted
            outcome.tokens += accepted + 1
        outcome.seconds += cost.seconds(lens) + sync_s * max(lens)
    return outcome


def _slots(traces: Sequence[Trace], num_slots: int) -> list[_Slot]:
    turns = -(-num_slots // len(traces))
    slots = []
    for i in range(num_slots):
        turn, first = divmod(i, len(traces))
        queue = [*traces[first:], *traces[:first]]
        slots.append(_Slot(queue, turn * len(queue[0].accepted) // turns))
    return slots
