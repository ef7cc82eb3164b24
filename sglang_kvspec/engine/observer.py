"""Observer of finished rounds: their costs, and the counters that operators read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.engine.verifier import Verification
from sglang_kvspec.planning.round_cost_model import WEIGHT, RoundCostModel
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.spec_sampler import VerifyResult
from sglang_kvspec.runtime.speeds import Speeds


class RoundObserver:
    """Observer that feeds counters, speeds and the cost model."""

    def __init__(
        self, counters: SpecCounters, speeds: Speeds, clock: RoundCostModel, timer: PhaseTimer
    ) -> None:
        """timer: the verifier's timer, which marks waits for residuals and forwards."""
        self._counters, self._speeds, self._clock, self._timer = counters, speeds, clock, timer
        self._fetch_wait_s = 0.0

    def observe_plain(self, started: StartedRound, context: float) -> None:
        """Observe a round without drafts. context: mean tokens of a request. Waits for the
        device."""
        self._counters.iterations += 1
        step_s = started.step_seconds()
        self._speeds.note_iteration(step_s * started.num_steps)
        assert started.made is not None
        self._clock.observe_plain(len(started.made.order), context, step_s)

    def observe(
        self,
        started: StartedRound,
        done: Verification,
        emitted: Sequence[VerifyResult | None],
        context: float,
        read: float,
    ) -> None:
        """Observe a round with drafts or verifications. context: mean tokens of a request. read:
        how many of them a draft reads. Waits for the device."""
        self._counters.iterations += 1
        self._counters.observe_piggyback(started.num_piggyback)
        draft_s = started.step_seconds() * max(started.lens)
        wait_s, verify_s = self._timer.seconds()
        self._fetch_wait_s += WEIGHT * (wait_s - self._fetch_wait_s)
        self._speeds.note_iteration(draft_s + wait_s + verify_s)
        lens, verified = started.lens, started.num_verified
        if not started.ends_prompts:
            self._clock.observe(
                lens,
                context,
                draft_s,
                verify_s,
                None if started.is_interrupted else started.enqueue_s,
                [n for n, entry in zip(verified, emitted, strict=True) if entry],
                started.between_s,
                started.num_piggyback,
                read,
            )
        self._counters.waits += sum(
            n == 0 and entry is None and i not in done.piggyback
            for i, (n, entry) in enumerate(zip(lens, emitted, strict=True))
        )

    def observe_idle(self, num_requests: int) -> None:
        """Count the waits of a round in which no request could go on."""
        self._counters.waits += num_requests

    def report(self) -> dict[str, Any]:
        """Return times in ms, for /server_info."""
        clock = self._clock
        return {
            # Keys: numbers of requests that drafted.
            "draft_iter_ms": {str(n): s * 1e3 for n, s in sorted(clock.draft_step_s.items())},
            # Time that verifications waited for residuals after the drafts.
            "fetch_wait_ms": self._fetch_wait_s * 1e3,
            "verify_ms": clock.verify_s * 1e3,
            "plain_step_ms": clock.plain_step_s * 1e3,
            # Time from a round to the next, where known, and least time of a round that verifies.
            "between_ms": clock.between_s * 1e3,
            "enqueue_ms": clock.enqueue_s * 1e3,
        }
