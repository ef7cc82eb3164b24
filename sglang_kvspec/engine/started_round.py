"""Round that a device has begun, while its batch may still change."""

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
    """Round that has begun. Request i is states[i] and adds lens[i] drafts.

    timer: runs while the round drafts. begun_at: time.perf_counter() when the device was first told
    of its steps. between_s: seconds since the last round for which the device had waited for this
    one, None where not known. num_steps: steps that the timer measures, also where the requests
    with the most drafts have left. is_interrupted: other forwards came before its end.
    plan: which requests verify and what is fetched for them; None where all verify, or where that
    is yet to be decided. late: requests that cannot verify whatever the plan, because some of their
    residuals are still on the network now. pending: requests of which that was so when the round
    began. held: requests that the schedule keeps from verifying.

    is_plain: the round takes tokens at the target precision instead. made: tokens that only the
    device knows. logits: of a plain round whose only token is to be chosen from them, a row for
    each of made.order.

    Set as the round ends. num_verified: drafts that each request verified. num_piggyback: requests
    that piggybacked a draft. ends_prompts: some requests had started on anchors, and verified more
    than drafts. enqueue_s: seconds from begun_at until all was enqueued.
    """

    states: Sequence[RequestState]
    lens: list[int]
    timer: PhaseTimer
    begun_at: float = 0.0
    between_s: float | None = None
    num_steps: int = 0
    is_interrupted: bool = False
    is_plain: bool = False
    made: DraftedTokens | None = None
    logits: torch.Tensor | None = None
    plan: RoundPlan | None = None
    late: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
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
    def unseen_lens(self) -> list[int]:
        """Drafts of each request that only the device knows."""
        return [0] * len(self.states) if self.made is None else list(self.made.lens)

    @property
    def is_idle(self) -> bool:
        """Return True if no request drafts in the round, and none can verify."""
        return not self.is_plain and not any(self.lens) and not self.verify

    def steps_on(self, page_size: int, most: int) -> int:
        """Return how many more steps, at most `most`, a plain round can take before the CPU has
        seen its tokens. While requests fill the pages that they have begun, nothing is encoded and
        no window slot changes hands. Return 0 where requests have come or gone, or a request took
        fewer steps than others. Return 0, too, where a request reaches its last token, or other
        forwards may have used the steps' rows since."""
        made = self.made
        if (
            self.is_interrupted
            or made is None
            or sorted(made.order) != list(range(len(self.states)))
        ):
            return 0
        if set(made.lens) != {len(made.tokens)}:
            return 0
        left = [
            min(state.remaining, page_size - state.committed_len % page_size) - made.lens[i]
            for i, state in enumerate(self.states)
        ]
        return max(0, min(most, *left))

    def keep_tokens(self) -> None:
        """Copy the tokens out of the steps' rows, which another forward is about to use. Call this
        on the stream of that forward, after the stream waits for the round."""
        if self.made is not None:
            self.made = replace(self.made, tokens=self.made.tokens.clone())

    def step_seconds(self) -> float:
        """Return the seconds of each step; 0 where the round has none. Waits for the device to
        finish the steps."""
        if self._step_s is None:
            seconds = self.timer.seconds()[0]
            self._step_s = seconds / self.num_steps if self.num_steps else 0.0
        return self._step_s

    def draft_ages_s(self, index: int) -> list[float]:
        """Return how many seconds before the last step each draft of a request was made."""
        if not self.lens[index]:
            return []
        step_s = self.step_seconds()
        return [(self.num_steps - 1 - step) * step_s for step in range(self.lens[index])]

    def for_batch(self, states: Sequence[RequestState]) -> StartedRound | None:
        """Return the round for a batch that some requests have left and others have joined; None
        when all have left. New requests have nothing in the round, and do not verify if its
        verifications were planned without them. Where all requests that were to verify have left,
        the plan is to be decided again. A request is its state object: SGLang makes a new one when
        it computes a request again."""
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
        pending = frozenset(now for before, now in places.items() if before in self.pending)
        held = frozenset(now for before, now in places.items() if before in self.held)
        return replace(
            self,
            states=states,
            lens=lens,
            made=made,
            plan=plan,
            late=none,
            pending=pending,
            held=held,
            num_verified=[],
        )
