"""Policies that say how far requests draft in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from sglang_kvspec.planning.rounds import RoundCost, RoundRequest, plan_round


@dataclass(frozen=True, slots=True)
class Coming:
    """Drafts that a request would make in a round. probability: its own acceptance so far, by the
    server's estimate. accepted, signal: of the drafts; a policy may only use the signal of drafts
    that it has let the request make."""

    probability: float
    draft_len: int
    accepted: int
    signal: Sequence[int]


class Policy(Protocol):
    def lens(self, requests: Sequence[Coming]) -> list[int]:
        """Return how many drafts each request makes. 0 everywhere: the round takes plain steps."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The same length in every round."""

    length: int

    def lens(self, requests: Sequence[Coming]) -> list[int]:
        return [min(self.length, request.draft_len) for request in requests]


@dataclass(frozen=True, slots=True)
class OwnAcceptance:
    """The server's lengths, by each request's acceptance so far and by the costs of a round."""

    cost: RoundCost

    def lens(self, requests: Sequence[Coming]) -> list[int]:
        planned = [RoundRequest(each.probability, each.draft_len) for each in requests]
        return plan_round(planned, self.cost)


@dataclass(frozen=True, slots=True)
class TopProbability:
    """Lengths that stop where the next draft is worth less than its cost.

    The next draft is worth the product of the calibrated chances of those made, times the request's
    own acceptance. chances: by signal. price: tokens a second that time is worth. late: drafts
    whose signals are not known yet when the next one is started.
    """

    cost: RoundCost
    chances: Sequence[float]
    price: float
    late: int = 0

    def lens(self, requests: Sequence[Coming]) -> list[int]:
        return lens_for_worth(
            [[self._worth(each, made) for made in range(each.draft_len)] for each in requests],
            self.cost,
            self.price,
        )

    def _worth(self, request: Coming, made: int) -> float:
        """Return the expected tokens of one more draft behind `made` drafts."""
        known = max(made - self.late, 0)
        so_far = prod(self.chances[signal] for signal in request.signal[:known])
        return float(so_far * request.probability ** (made + 1 - known))


@dataclass(frozen=True, slots=True)
class Oracle:
    """Lengths that end before the first draft that would be rejected. price: as above."""

    cost: RoundCost
    price: float

    def lens(self, requests: Sequence[Coming]) -> list[int]:
        worths = [[1.0] * each.accepted for each in requests]
        return lens_for_worth(worths, self.cost, self.price)


def lens_for_worth(worths: Sequence[Sequence[float]], cost: RoundCost, price: float) -> list[int]:
    """Return lengths like planning's for a price of time in tokens a second. worths: expected
    tokens of each draft of each request, in order.

    A request drafts on while its next draft is worth more than its row and its verified token. A
    step is taken while what its rows gain exceeds the step's fixed cost.
    """
    row_price, step_price = price * (cost.row + cost.token), price * cost.step
    lens = [0] * len(worths)
    going = list(range(len(worths)))
    while True:
        going = [i for i in going if lens[i] < len(worths[i]) and worths[i][lens[i]] > row_price]
        if not going or sum(worths[i][lens[i]] - row_price for i in going) <= step_price:
            return lens
        for i in going:
            lens[i] += 1
