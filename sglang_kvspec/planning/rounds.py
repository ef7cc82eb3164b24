"""How long every request of a batch drafts before all of them verify together.

Where residuals lie in GPU memory nothing has to be hidden behind drafting, so requests need not
take turns: they draft at once, in steps that need no decision in between, and verify at once. Where
they do not all lie there, round_step.py decides which requests verify and which draft on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ITERATIONS = 16
# Of the best rate, prices of a draft to try where rounds wait for the CPU, so that drafts are free.
CHEAPER = (0.5, 0.25, 0.0)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Seconds. A draft step of b rows takes step + row * b, verifying t tokens of r requests
    step + request * r + token * t. plain: where a step without drafts is no such verification, it
    takes this many times step + request * r. enqueue: least that a round with a verification
    takes. between: from the end of such a round to the first step of the next."""

    step: float
    row: float
    request: float
    token: float
    plain: float | None = None
    enqueue: float = 0.0
    between: float = 0.0

    def seconds(self, draft_lens: Sequence[int], num_verify: float | None = None) -> float:
        """Of a round in which request i drafts draft_lens[i] tokens and num_verify of them verify,
        all unless given, as many drafts as were made."""
        drafted = sum(draft_lens)
        if not drafted and self.plain is not None:
            return self.plain * (self.step + self.request * len(draft_lens))
        num_verify = len(draft_lens) if num_verify is None else num_verify
        steps = max(draft_lens, default=0) + 1
        verified = drafted + num_verify
        requests = self.request * num_verify
        seconds = self.step * steps + self.row * drafted + requests + self.token * verified
        return max(seconds, self.enqueue) + self.between


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """probability: that the target agrees with one more draft. cap_len: most drafts. num_drafts:
    those it has from rounds at whose end it did not verify. interval: rounds from one of its
    verifications to the next."""

    probability: float
    cap_len: int
    num_drafts: int = 0
    interval: float = 1.0

    def __post_init__(self) -> None:
        assert 0 <= self.probability < 1, self.probability
        assert self.interval >= 1, self.interval

    @property
    def first_worth(self) -> float:
        """Tokens that one draft in every round adds to a round."""
        p, rounds = self.probability, self.interval
        return p * (1 - self.fading) / ((1 - p) * rounds)

    @property
    def fading(self) -> float:
        """Worth of a draft in every round over that of the one before it in the round."""
        return float(self.probability**self.interval)


def plan_round(requests: Sequence[RoundRequest], cost: RoundCost) -> list[int]:
    """How many drafts each request adds to those it has, with the most expected tokens a second;
    all 0 where drafting does not pay.

    A request that verifies every m rounds, and makes j drafts in each, expects the sum of
    probability^k over k = 0 .. m j of every verification, a token of its own included: per round
    that is 1 / m, and for each of the j drafts probability^m times as much as for the one before.
    At a rate of r tokens a second a draft pays while it is worth more than r times its row and its
    verified token, and a step while what its rows gain exceeds r times what it costs whatever their
    number. Both worths fall with j, so the best lengths for a given rate are found one step after
    the other; the rate they reach is the next one to try (Dinkelbach 1967), until it no longer
    rises.
    """
    best = [0] * len(requests)
    rate = expected_rate(requests, best, cost)
    for _ in range(MAX_ITERATIONS):
        lens = _best_lens(requests, cost, rate)
        new_rate = expected_rate(requests, lens, cost)
        if new_rate <= rate:
            break
        best, rate = lens, new_rate
    if cost.enqueue > 0:
        tried = [best, *(_best_lens(requests, cost, share * rate) for share in CHEAPER)]
        best = max(tried, key=lambda lens: expected_rate(requests, lens, cost))
    return best


def expected_rate(
    requests: Sequence[RoundRequest], draft_lens: Sequence[int], cost: RoundCost
) -> float:
    """Tokens a second that all requests together may expect where every round adds such drafts."""
    tokens = num_verify = 0.0
    for request, length in zip(requests, draft_lens, strict=True):
        num_verify += 1 / request.interval
        worth = request.first_worth
        for _ in range(length):
            tokens += worth
            worth *= request.fading
    return (tokens + num_verify) / cost.seconds(draft_lens, num_verify)


def _best_lens(requests: Sequence[RoundRequest], cost: RoundCost, rate: float) -> list[int]:
    price, step_price = rate * (cost.row + cost.token), rate * cost.step
    lens = [0] * len(requests)
    worths = [request.first_worth for request in requests]
    rooms = [request.cap_len - request.num_drafts for request in requests]
    going = [i for i, room in enumerate(rooms) if room > 0]
    while True:
        going = [i for i in going if worths[i] > price and lens[i] < rooms[i]]
        if not going or sum(worths[i] - price for i in going) <= step_price:
            return lens
        for i in going:
            lens[i] += 1
            worths[i] *= requests[i].fading
