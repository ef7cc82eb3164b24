"""How long every request of a batch drafts before all of them verify together.

Where residuals lie in GPU memory nothing has to be hidden behind drafting, so requests need not
take turns: they draft at once, in steps that need no decision in between, and verify at once. Where
they do not all lie there, round_step.py decides which requests verify and which draft on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Of a new measurement in a running mean.
WEIGHT = 0.2
# Of a guess beside measurements, of which the newest weighs 1.
GUESS_WEIGHT = 0.25
MAX_ITERATIONS = 16
# Rounds without drafts after which what drafts cost is measured anew.
ROUNDS_BEFORE_RETRY = 512


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Seconds. A draft step of b rows takes step + row * b, verifying t tokens of r requests
    step + request * r + token * t."""

    step: float
    row: float
    request: float
    token: float

    def seconds(self, draft_lens: Sequence[int]) -> float:
        """Of a round in which request i drafts draft_lens[i] tokens."""
        drafted = sum(draft_lens)
        steps = max(draft_lens, default=0) + 1
        verified = drafted + len(draft_lens)
        requests = self.request * len(draft_lens)
        return self.step * steps + self.row * drafted + requests + self.token * verified


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """probability: that the target agrees with one more draft. cap_len: most drafts. num_drafts:
    those it has from rounds at whose end it did not verify."""

    probability: float
    cap_len: int
    num_drafts: int = 0


def plan_round(requests: Sequence[RoundRequest], cost: RoundCost) -> list[int]:
    """How many drafts each request adds to those it has, with the most expected tokens a second;
    all 0 where drafting does not pay.

    The j-th draft of a request is worth probability^j tokens. At a rate of r tokens a second it
    pays while that exceeds r times its row and its verified token, and a step while what its rows
    gain exceeds r times what it costs whatever their number. Both worths fall with j, so the best
    lengths for a given rate are found one step after the other; the rate they reach is the next
    one to try (Dinkelbach 1967), until it no longer rises.
    """
    best = [0] * len(requests)
    rate = expected_rate(requests, best, cost)
    for _ in range(MAX_ITERATIONS):
        lens = _best_lens(requests, cost, rate)
        new_rate = expected_rate(requests, lens, cost)
        if new_rate <= rate:
            break
        best, rate = lens, new_rate
    return best


def expected_rate(
    requests: Sequence[RoundRequest], draft_lens: Sequence[int], cost: RoundCost
) -> float:
    """Tokens a second that all requests together may expect of a round that adds such drafts."""
    tokens = 0.0
    for request, length in zip(requests, draft_lens, strict=True):
        tokens += 1.0
        worth = _next_worth(request)
        for _ in range(length):
            tokens += worth
            worth *= request.probability
    return tokens / cost.seconds(draft_lens)


def _best_lens(requests: Sequence[RoundRequest], cost: RoundCost, rate: float) -> list[int]:
    price, step_price = rate * (cost.row + cost.token), rate * cost.step
    lens = [0] * len(requests)
    worths = [_next_worth(request) for request in requests]
    rooms = [request.cap_len - request.num_drafts for request in requests]
    going = [i for i, room in enumerate(rooms) if room > 0]
    while True:
        going = [i for i in going if worths[i] > price and lens[i] < rooms[i]]
        if not going or sum(worths[i] - price for i in going) <= step_price:
            return lens
        for i in going:
            lens[i] += 1
            worths[i] *= requests[i].probability


def _next_worth(request: RoundRequest) -> float:
    """Chance that one more draft is accepted, as all before it have to be."""
    return float(request.probability ** (request.num_drafts + 1))


class RoundClock:
    """Learns what rounds cost from how long they take.

    step: seconds of a draft step without context, measured at the start or guessed. request_reads:
    bytes that verifying reads of a context over those that a draft step reads.
    """

    def __init__(self, step: float, request_reads: float) -> None:
        # Of a draft step, over the tokens of context that its rows read.
        self._draft = _FadingLine(step)
        self._request_reads = request_reads
        self._token: float | None = None
        self._rounds_without_drafts = 0
        self.draft_step_s = 0.0
        self.verify_s = 0.0

    @property
    def has_measured(self) -> bool:
        """Whether a round with drafts was observed lately. What drafts cost once, at another
        context or by accident, must not stop them for good."""
        return self._draft.weight > 0 and self._rounds_without_drafts < ROUNDS_BEFORE_RETRY

    def observe(
        self,
        draft_lens: Sequence[int],
        context: float,
        draft_s: float,
        verify_s: float,
        verified_lens: Sequence[int] | None = None,
    ) -> None:
        """A round of these lengths, over a mean context of so many tokens, took so long.

        verified_lens: drafts of each request that verified, those of all unless given.
        """
        verified_lens = draft_lens if verified_lens is None else verified_lens
        steps, drafted = max(draft_lens, default=0), sum(draft_lens)
        if steps:
            if not self.has_measured:
                self._draft.forget()
            self._draft.observe(drafted * max(context, 1.0) / steps, draft_s / steps)
            self.draft_step_s = _mean(self.draft_step_s or None, draft_s / steps)
        self._rounds_without_drafts = 0 if steps else self._rounds_without_drafts + 1
        if not verified_lens:
            return
        self.verify_s = _mean(self.verify_s or None, verify_s)
        if self._draft.weight:
            known = replace(self.cost(context), token=0.0).seconds([0] * len(verified_lens))
            num_tokens = sum(verified_lens) + len(verified_lens)
            self._token = _mean(self._token, max(0.0, verify_s - known) / num_tokens)

    def cost(self, context: float) -> RoundCost:
        """Of a round over a mean context of so many tokens."""
        step, per_token = self._draft.fit()
        row = per_token * context
        return RoundCost(step, row, row * self._request_reads, self._token or 0.0)


class _FadingLine:
    """y = start + slope * x, both >= 0, by least squares over measurements that fade and over one
    at x = 0, the guess, that does not."""

    def __init__(self, guess: float) -> None:
        self._guess = guess
        self.forget()

    def forget(self) -> None:
        """Only the guess is left."""
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        # Nothing is quicker than what has no context to read.
        self._guess = min(self._guess, y)
        keep = 1 - WEIGHT
        self.weight = keep * self.weight + 1
        self._x = keep * self._x + x
        self._y = keep * self._y + y
        self._xx = keep * self._xx + x * x
        self._xy = keep * self._xy + x * y

    def fit(self) -> tuple[float, float]:
        """(start, slope)."""
        weight, y = self.weight + GUESS_WEIGHT, self._y + GUESS_WEIGHT * self._guess
        spread = weight * self._xx - self._x**2
        slope = max(0.0, (weight * self._xy - self._x * y) / spread) if spread > 0 else 0.0
        start = (y - slope * self._x) / weight
        return (start, slope) if start >= 0 else (0.0, self._xy / self._xx)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
