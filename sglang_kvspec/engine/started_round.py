"""A round that a device has begun, while the batch it was begun for may still change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from sglang_kvspec.planning.round_plan import RoundPlan
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.request_state import RequestState


@dataclass(slots=True)
class StartedRound:
    """Request i is states[i] and adds lens[i] drafts.

    timer: runs while the round drafts. begun_at: time.perf_counter() when the device was first told
    of its steps. between_s: seconds since the last round for which the device had waited for that,
    None where they are not known. num_steps: what the timer's seconds are of, also where the
    requests with the most drafts have left. is_held_up: other forwards came before its end.
    plan: which requests verify and what is fetched for that; None where all do, or that is yet to
    be decided. late: requests that cannot verify whatever the plan, as residuals of theirs are
    still on the network, by now; lacking: those of which that was so when the round began. held:
    those that the schedule keeps from verifying.

    is_plain: the round takes tokens at the target precision instead. made: tokens that only the
    device knows. logits: of a plain round whose one token is to be chosen from them, a row for each
    of made.order.

    Of a round that is over: num_verified: drafts that each request had verified; num_piggyback:
    requests that drafted in the forward of others; ends_prompts: more than drafts were verified, of
    requests that had started on anchors; enqueue_s: from begun_at until all was enqueued.
    """

    states: Sequence[RequestState]
    lens: list[int]
    timer: PhaseTimer
    begun_at: float = 0.0
    between_s: float | None = None
    num_steps: int = 0
    is_held_up: bool = False
    is_plain: bool = False
    made: DraftedTokens | None = None
    logits: torch.Tensor | None = None
    plan: RoundPlan | None = None
    late: frozenset[int] = frozenset()
    lacking: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    num_verified: list[int] = field(default_factory=list)
    num_piggyback: int = 0
    enqueue_s: float = 0.0
    ends_prompts: bool = False
    _step_s: float | None = None

    def __post_init__(self) -> None:
        self.num_verified = self.num_verified or [0] * len(self.states)

    @property
    def verify(self) -> Sequence[int]:
        """Requests that verify at the end."""
        planned = range(len(self.states)) if self.plan is None else self.plan.verify
        return [i for i in planned if i not in self.late and i not in self.held]

    @property
    def is_idle(self) -> bool:
        """Whether no request drafts in it, and none can verify."""
        return not self.is_plain and not any(self.lens) and not self.verify

    def steps_on(self, page_size: int, most: int) -> int:
        """Of a plain round: steps that its requests can take on top before the CPU has seen their
        tokens, at most `most`. As long as they fill the pages that they have begun, nothing is
        encoded and no slot of the window changes hands. 0 where requests have come or gone, where
        one of them is to have all its tokens, where one took fewer steps than others, and where
        others may have used the steps' rows since."""
        made = self.made
        if self.is_held_up or made is None or sorted(made.order) != list(range(len(self.states))):
            return 0
        if set(made.lens) != {len(made.tokens)}:
            return 0
        left = [
            min(state.remaining, page_size - state.committed_len % page_size) - made.lens[i]
            for i, state in enumerate(self.states)
        ]
        return max(0, min(most, *left))

    def keep_tokens(self) -> None:
        """Others are about to use the steps' rows, in which its tokens lie. To be called behind
        it, on the device's stream of those others."""
        if self.made is not None:
            self.made = replace(self.made, tokens=self.made.tokens.clone())

    def step_seconds(self) -> float:
        """Of each of its steps; 0 where it has none. Waits for the device to make them."""
        if self._step_s is None:
            seconds = self.timer.seconds()[0]
            self._step_s = seconds / self.num_steps if self.num_steps else 0.0
        return self._step_s

    def draft_ages_s(self, index: int) -> list[float]:
        """How long before its last step each draft of a request was made."""
        if not self.lens[index]:
            return []
        step_s = self.step_seconds()
        return [(self.num_steps - 1 - step) * step_s for step in range(self.lens[index])]

    def for_batch(self, states: Sequence[RequestState]) -> StartedRound | None:
        """The same for a batch of which some requests have left and others come, which have nothing
        in it; None when all have left. A request is its state object: SGLang makes a new one when
        it computes a request again. Whoever has come does not verify where that was planned
        without them, and where all have left who were to, it is yet to be decided who does."""
        place = {id(state): i for i, state in enumerate(states)}
        places = {i: place[id(s)] for i, s in enumerate(self.states) if id(s) in place}
        if not places:
            return None
        lens = [0] * len(states)
        for before, now in places.items():
            lens[now] = self.lens[before]
        made = self.made
        if made is not None:
            counts = [0] * len(states)
            for before, now in places.items():
                counts[now] = made.lens[before]
            made = made.rearranged(places, counts)
        plan = self.plan
        if plan is not None:
            verify = sorted(places[i] for i in plan.verify if i in places)
            plan = replace(plan, verify=tuple(verify)) if verify or not plan.verify else None
        none: frozenset[int] = frozenset()
        lacking = frozenset(now for before, now in places.items() if before in self.lacking)
        held = frozenset(now for before, now in places.items() if before in self.held)
        return replace(
            self,
            states=states,
            lens=lens,
            made=made,
            plan=plan,
            late=none,
            lacking=lacking,
            held=held,
            num_verified=[],
        )
