"""Draft lengths of a round in which all requests of a batch verify together.

If all residuals are in GPU memory, no fetch has to be hidden behind drafting, and requests need not
take turns. They draft at once, in steps that need no decision in between, and verify at once. If
not all residuals are there, round_step.py decides which requests verify and which draft on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ITERATIONS = 16
# Prices of a draft to try if rounds wait for the CPU, as shares of the best rate. Some drafts are
# free there.
CHEAPER = (0.5, 0.25, 0.0)

# No round takes less. A fit may say that a step takes no time, and where all requests wait for
# residuals, a plan has no other costs.
LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Seconds of a round's parts. A draft step of b rows takes step + row * b. Verifying t tokens
    of r requests takes target + request * r + token * t.

    target_step: seconds of a forward of the target without context; `target` is at least step.
    Drafts may read smaller weights than the target. plain: None where a step without drafts is such
    a verification; otherwise the step takes this many times target + request * r. enqueue: least
    seconds of a round with a verification. between: from the end of such a round to the first step
    of the next. piggyback: True if requests that do not verify piggyback a draft on the
    verification.
    """

    step: float
    row: float
    request: float
    token: float
    plain: float | None = None
    enqueue: float = 0.0
    between: float = 0.0
    piggyback: bool = False
    target_step: float = 0.0

    @property
    def target(self) -> float:
        """Seconds of a forward of the target without context and tokens."""
        return max(self.step, self.target_step)

    def seconds(self, draft_lens: Sequence[int], num_verify: float | None = None) -> float:
        """Return the seconds of a round in which request i drafts draft_lens[i] tokens. num_verify:
        requests that verify, all unless given; together they verify as many drafts as were made."""
        drafted: float = sum(draft_lens)
        if not drafted and self.plain is not None:
            return max(self.plain * (self.target + self.request * len(draft_lens)), LEAST_S)
        num_verify = len(draft_lens) if num_verify is None else num_verify
        steps = max(draft_lens, default=0)
        if self.piggyback:
            drafted += min(num_verify, 1.0) * (len(draft_lens) - num_verify)
        verified = drafted + num_verify
        verification = self.target + self.request * num_verify + self.token * verified
        seconds = self.step * steps + self.row * drafted + verification
        return max(seconds, self.enqueue, LEAST_S) + self.between


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """Request to plan for. probability: chance that the target agrees with one more draft. cap_len:
    most drafts. num_drafts: drafts from rounds at whose end the request did not verify."""

    probability: float
    cap_len: int
    num_drafts: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.probability < 1, self.probability

    @property
    def room(self) -> int:
        """Drafts that the request may add."""
        return max(self.cap_len - self.num_drafts, 0)

    @property
    def next_worth(self) -> float:
        """Chance that one more draft is accepted, which all drafts before it must be, too."""
        return float(self.probability ** (self.num_drafts + 1))


def plan_round(requests: Sequence[RoundRequest], cost: RoundCost) -> list[int]:
    """Return how many drafts each request adds, for the most expected tokens a second; all 0 where
    drafting does not pay.

    The j-th draft of a request is worth probability^j tokens. At a rate of r tokens a second, a
    draft pays while that exceeds r times the cost of its row and its verified token. A step
    pays while the gain of its rows exceeds r times its fixed cost. Worth and gain fall with j, so
    the best lengths for a rate are found step by step. The rate that these lengths reach is the
    next one to try (Dinkelbach 1967), until the rate stops rising.
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
    """Return the expected tokens a second of all requests in a round that adds draft_lens drafts
    and ends with a verification of all."""
    tokens = 0.0
    for request, length in zip(requests, draft_lens, strict=True):
        tokens += 1.0
        worth = request.next_worth
        for _ in range(length):
            tokens += worth
            worth *= request.probability
    return tokens / cost.seconds(draft_lens)


def _best_lens(requests: Sequence[RoundRequest], cost: RoundCost, rate: float) -> list[int]:
    price, step_price = rate * (cost.row + cost.token), rate * cost.step
    lens = [0] * len(requests)
    worths = [request.next_worth for request in requests]
    rooms = [request.room for request in requests]
    going = [i for i, room in enumerate(rooms) if room > 0]
    while True:
        going = [i for i in going if worths[i] > price and lens[i] < rooms[i]]
        if not going or sum(worths[i] - price for i in going) <= step_price:
            return lens
        for i in going:
            lens[i] += 1
            worths[i] *= requests[i].probability
