"""Running estimates of positive amounts, robust against outliers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

# Weight of a new observation.
RATE = 0.05
# Most mean deviations by which an observation counts; a larger error is clipped.
OUTLIER_DEVIATIONS = 3.0
LEAST_DEVIATION, FIRST_DEVIATION = 0.01, 0.2
# Number of first observations of which the median counts. Later ones have a mean to compare with.
NUM_FIRST = 5


@dataclass(frozen=True, slots=True)
class Deviation:
    """Mean relative error of predictions, which tells outliers from real changes.

    An observation raises the mean by a tenth at most. So one stall is an outlier, and a lasting
    change of level raises the mean until the change is believed.
    """

    mean: float = FIRST_DEVIATION

    def clip(self, error: float) -> float:
        limit = OUTLIER_DEVIATIONS * self.mean
        return min(max(error, -limit), limit)

    def observe(self, error: float) -> Deviation:
        mean = self.mean + RATE * (abs(self.clip(error)) - self.mean)
        return Deviation(max(mean, LEAST_DEVIATION))


@dataclass(frozen=True, slots=True)
class OnlineValue:
    """Running estimate of a positive amount; observe() returns a new estimate.

    The scale is logarithmic: twice as much and half as much weigh the same. The value is a guess
    until the first observation, then the median of the guess and the first NUM_FIRST observations.
    After these, it is a mean in which old observations fade and outliers are clipped.
    """

    value: float
    num_observed: int = 0
    first: tuple[float, ...] = ()
    deviation: Deviation = Deviation()

    @property
    def observed(self) -> float | None:
        """The value without the guess; None until the first observation."""
        if not self.num_observed:
            return None
        if self.num_observed <= NUM_FIRST:
            return exp(median(self.first[1:]))
        return self.value

    def observe(self, value: float) -> OnlineValue:
        """Return the estimate after one more observation. Zero, negative and non-finite values are
        ignored."""
        if not 0 < value < float("inf"):
            return self
        num_observed = self.num_observed + 1
        if num_observed <= NUM_FIRST:
            first = (*(self.first or (log(self.value),)), log(value))
            return replace(self, value=exp(median(first)), num_observed=num_observed, first=first)
        error = log(value / self.value)
        return replace(
            self,
            value=self.value * exp(RATE * self.deviation.clip(error)),
            num_observed=num_observed,
            deviation=self.deviation.observe(error),
        )
