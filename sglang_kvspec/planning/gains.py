"""Expected tokens a second of one deployment over another, and what `auto` takes by them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from sglang_kvspec.planning.forecast import Deployment, forecast

T = TypeVar("T")

# Lengths of context to compare at, as far as the model has them.
CONTEXTS = (4096, 32768)
# Share of the tokens a second that a change must keep everywhere.
LEAST_KEPT = 0.98


@dataclass(frozen=True, slots=True)
class Gain:
    """Ratio of tokens a second, for so many requests of a context length."""

    ratio: float
    context_len: int
    num_requests: int

    def __str__(self) -> str:
        requests = "1 request" if self.num_requests == 1 else f"{self.num_requests} requests"
        return f"{self.ratio:.2f} times the tokens/s for {requests} of {self.context_len:,} tokens"


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """Value that `auto` takes, and why, as the end of a sentence."""

    value: T
    reason: str


def choose_by_gain(
    base: Deployment, changed: Deployment, values: tuple[T, T], least_gain: float, what: str
) -> Choice[T]:
    """Choose among the values of `base` and of `changed`: the latter, if it keeps LEAST_KEPT
    everywhere and gains the factor least_gain somewhere. what: subject of the reason."""
    least, most = least_and_most(base, changed)
    if least.ratio < LEAST_KEPT:
        return Choice(values[0], f"{what} promise {least}")
    return Choice(values[most.ratio >= least_gain], f"{what} promise {most}")


def least_and_most(base: Deployment, changed: Deployment) -> tuple[Gain, Gain]:
    """Return the least and the greatest gain of `changed` over `base`, for one request and for as
    many as `base` may run, at all CONTEXTS. Residuals are where the deployments have room for
    them."""
    longest = base.model.max_context
    gains = [
        Gain(_ratio(base, changed, context, count), context, count)
        for context in sorted({min(context, longest) for context in CONTEXTS})
        for count in sorted({1, base.max_requests})
    ]
    least, most = (pick(gains, key=lambda gain: gain.ratio) for pick in (min, max))
    return least, most


def _ratio(base: Deployment, changed: Deployment, context_len: int, num_requests: int) -> float:
    """Return the tokens a second of `changed`, relative to those of `base`. 1 where no request
    fits."""
    own, other = (
        forecast(replace(each, max_requests=num_requests), context_len).fetched.tokens_per_s
        for each in (base, changed)
    )
    return other / own if own else 1.0
