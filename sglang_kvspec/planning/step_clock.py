"""Measured seconds of draft steps with and without proposals, and of what follows them."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_kvspec.planning.proposal_choice import StepTimes

# Weight of the newest measurement in a running mean.
WEIGHT = 0.2
# A measurement counts as these multiples of the mean at most, the first one of the first value: a
# pause of the CPU is no price.
MOST_OF_MEAN, MOST_OF_FIRST = 2.0, 8.0
# Nothing takes less, in seconds.
LEAST_S = 1e-6
# Rate at which prices go back to their first values while no step with proposals is taken. A price
# that a disturbance raised must not stop proposals for good. Where the measured price is right, the
# rate is about the share of tokens a second that this costs at most.
FADE = 0.005
# First values, in seconds: what the CPU does for a step with proposals, for the start of steps, and
# for a round besides its draft steps, also where its work overlaps with no drafts.
HOST_S, LOAD_S, REST_S, LAG_S = 3e-4, 2e-4, 3e-3, 1e-3


class Mean:
    """Running mean in seconds, in place of a first value."""

    def __init__(self, first: float) -> None:
        self._first = self._mean = first
        # Share of the mean in `value`, the rest being that of the first value.
        self._trust = 0.0
        self._is_measured = False

    @property
    def value(self) -> float:
        return self._first + self._trust * (self._mean - self._first)

    def observe(self, seconds: float) -> None:
        """Learn from a measurement. The mean is trusted again."""
        seconds = max(seconds, LEAST_S)
        if self._is_measured:
            self._mean += WEIGHT * (min(seconds, MOST_OF_MEAN * self._mean) - self._mean)
        else:
            self._mean = min(seconds, MOST_OF_FIRST * self._first)
        self._trust, self._is_measured = 1.0, True

    def fade(self) -> None:
        """Move towards the first value, until the next measurement."""
        self._trust -= FADE * self._trust


class StepClock:
    """Running means of one kind of batch: of as many requests, all of them greedy or not."""

    def __init__(self, ordinary_s: float, wide_s: Mapping[int, float]) -> None:
        """ordinary_s, wide_s: seconds that the device takes for a step without context, by tokens
        of a request for steps with proposals."""
        self.ordinary, self.load = Mean(ordinary_s), Mean(LOAD_S)
        self.rest, self.lag = Mean(REST_S), Mean(LAG_S)
        self.wide = {width: Mean(seconds + HOST_S) for width, seconds in wide_s.items()}

    def observe_ordinary(self, num_steps: int, steps_s: float, round_s: float | None) -> None:
        """Learn from a round of ordinary steps. steps_s: of its draft steps. round_s: of the whole
        round, None where other work came between."""
        self.ordinary.observe(steps_s / num_steps)
        if round_s is not None:
            self.rest.observe(max(round_s - steps_s, 0.0))

    def observe_waited_rest(self, seconds: float) -> None:
        """Learn how long a round took behind a step that the CPU waited for."""
        self.lag.observe(max(seconds - self.rest.value, 0.0))

    def fade(self) -> None:
        """Note a round whose proposals were not worth their price."""
        for mean in (self.lag, *self.wide.values()):
            mean.fade()

    def report_ms(self) -> dict[str, float]:
        """Return what steps are expected to take, in ms, for operators."""
        times = self.times()
        wide = {f"wide_{width}": seconds for width, seconds in times.wide.items()}
        named = {"ordinary": times.ordinary, **wide, "load": times.load, "rest": times.rest}
        named["waited_rest"] = times.waited_rest
        return {name: seconds * 1e3 for name, seconds in named.items()}

    def times(self) -> StepTimes:
        """Return what steps are expected to take."""
        rest_s = self.rest.value
        return StepTimes(
            self.ordinary.value,
            self.load.value,
            {width: mean.value for width, mean in self.wide.items()},
            rest_s,
            rest_s + self.lag.value,
        )
