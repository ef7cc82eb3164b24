"""Amounts learnt while serving, one observation after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

# Weight of a new observation.
RATE = 0.05
# An observation further off than so many mean deviations counts as if it were that far off.
OUTLIER_DEVIATIONS = 3.0
LEAST_DEVIATION, FIRST_DEVIATION = 0.01, 0.2
# Observations of which the median counts, before there is a mean to tell outliers by.
NUM_FIRST = 5


@dataclass(frozen=True, slots=True)
class Deviation:
    """Mean relative error of predictions, by which outliers are told from news.

    It grows by a tenth at most with an observation: one stall is an outlier, a lasting change of
    level raises it until the change is believed.
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
    """A positive amount as last believed; observing returns a new one.

    On a logarithmic scale: twice and half as much weigh the same. A guess until it is observed,
    then the median of guess and first observations, then a mean in which old ones fade and
    outliers are clipped.
    """

    value: float
    num_observed: int = 0
    first: tuple[float, ...] = ()
    deviation: Deviation = Deviation()

    @property
    def observed(self) -> float | None:
        """The value without the guess; None until one was observed."""
        if not self.num_observed:
            return None
        if self.num_observed <= NUM_FIRST:
            return exp(median(self.first[1:]))
        return self.value

    def observe(self, value: float) -> OnlineValue:
        """Zero, negative and non-finite values teach nothing."""
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
