"""Speed of the link and time of an iteration, as measured while serving."""

from __future__ import annotations

from typing import Any

from sglang_kvspec.kv.residual_pages import Residuals
from sglang_kvspec.planning.link_estimate import LinkEstimate
from sglang_kvspec.planning.online import OnlineValue

# Guess until an iteration was measured.
GUESSED_ITERATION_S = 10e-3


class Speeds:
    """Estimates of the link's speed and of an iteration's time: guesses first, then values from
    fetches and iterations that have ended. Nothing waits for a measurement. Each rank has its own
    estimates, so rank 0 must broadcast what it decides by them."""

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals
        self._link = LinkEstimate()
        self._iteration_s = OnlineValue(GUESSED_ITERATION_S)

    def note_fetches(self) -> None:
        """Learn from the fetches that have ended since the last call."""
        for num_bytes, seconds in self._residuals.take_fetch_times():
            self._link = self._link.observe(num_bytes, seconds)

    def note_iteration(self, seconds: float) -> None:
        """Learn from an iteration that took `seconds`, during which residuals could move."""
        self._iteration_s = self._iteration_s.observe(seconds)

    @property
    def link_bytes_per_s(self) -> float:
        return self._link.bytes_per_s

    @property
    def iteration_s(self) -> float:
        return self._iteration_s.value

    @property
    def observed_link_bytes_per_s(self) -> float | None:
        """Bytes a second according to fetches alone, without the guess; None before the first
        fetch."""
        return self._link.rate.observed

    @property
    def observed_iteration_s(self) -> float | None:
        """Seconds of an iteration by measurements alone, without the guess; None before the
        first."""
        return self._iteration_s.observed

    def report(self) -> dict[str, Any]:
        """Return what was observed, for /server_info. None stands for no observation."""
        return {
            "link_bytes_per_s": self.observed_link_bytes_per_s,
            "link_observations": self._link.rate.num_observed,
            "iteration_s": self.observed_iteration_s,
            "iteration_observations": self._iteration_s.num_observed,
        }
