"""How long every request of a batch drafts before all of them verify together.

Where residuals lie in GPU memory nothing has to be hidden behind drafting, so requests need not
take turns: they draft at once, in steps that need no decision in between, and verify at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Of a new measurement in a running mean.
WEIGHT = 0.2
# Of a guess beside measurements, of which the newest weighs 1.
GUESS_WEIGHT = 0.25
# Where a guessed slope counts as one measurement, in tokens of context, and its weight.
FAR = 100_000.0
FAR_WEIGHT = 0.05
MAX_ITERATIONS = 16
# Rounds without drafts after which what drafts cost is measured anew.
ROUNDS_BEFORE_RETRY = 64
# Of what makes steps without drafts seem dear, forgotten in a round with drafts.
PLAIN_FADE = 0.02
# A round that took hardly longer than enqueuing it waited for the CPU.
ENQUEUED_SHARE = 0.9
# Of the best rate, prices of a draft to try where rounds wait for the CPU, so that drafts are free.
CHEAPER = (0.5, 0.25, 0.0)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Seconds. A draft step of b rows takes step + row * b, verifying t tokens of r requests
    step + request * r + token * t. plain: where a step without drafts is no such verification, it
    takes this many times step + request * r. enqueue: least a round with drafts takes."""

    step: float
    row: float
    request: float
    token: float
    plain: float | None = None
    enqueue: float = 0.0

    def seconds(self, draft_lens: Sequence[int]) -> float:
        """Of a round in which request i drafts draft_lens[i] tokens."""
        drafted = sum(draft_lens)
        if not drafted and self.plain is not None:
            return self.plain * (self.step + self.request * len(draft_lens))
        steps = max(draft_lens, default=0) + 1
        verified = drafted + len(draft_lens)
        requests = self.request * len(draft_lens)
        seconds = self.step * steps + self.row * drafted + requests + self.token * verified
        return max(seconds, self.enqueue) if drafted else seconds


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """probability: that the target agrees with one more draft. cap_len: most drafts."""

    probability: float
    cap_len: int


def plan_round(requests: Sequence[RoundRequest], cost: RoundCost) -> list[int]:
    """Draft lengths with the most expected tokens a second; all 0 where drafting does not pay.

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
    if cost.enqueue > 0:
        tried = [best, *(_best_lens(requests, cost, share * rate) for share in CHEAPER)]
        best = max(tried, key=lambda lens: expected_rate(requests, lens, cost))
    return best


def expected_rate(
    requests: Sequence[RoundRequest], draft_lens: Sequence[int], cost: RoundCost
) -> float:
    """Tokens a second that all requests together may expect of a round."""
    tokens = 0.0
    for request, length in zip(requests, draft_lens, strict=True):
        worth = 1.0
        for _ in range(length + 1):
            tokens += worth
            worth *= request.probability
    return tokens / cost.seconds(draft_lens)


def _best_lens(requests: Sequence[RoundRequest], cost: RoundCost, rate: float) -> list[int]:
    price, step_price = rate * (cost.row + cost.token), rate * cost.step
    lens = [0] * len(requests)
    worths = [request.probability for request in requests]
    going = [i for i, request in enumerate(requests) if request.cap_len > 0]
    while True:
        going = [i for i in going if worths[i] > price and lens[i] < requests[i].cap_len]
        if not going or sum(worths[i] - price for i in going) <= step_price:
            return lens
        for i in going:
            lens[i] += 1
            worths[i] *= requests[i].probability


class RoundClock:
    """Learns what rounds cost from how long they take.

    step: seconds of a draft step without context, measured at the start or guessed. request_reads:
    bytes that verifying reads of a context over those that a draft step reads. has_plain: whether
    steps without drafts are not verifications, and are observed by observe_plain(). row_per_token:
    a guess of the seconds that a token of context adds to a draft step, which counts until longer
    contexts are seen.
    """

    def __init__(
        self,
        step: float,
        request_reads: float,
        *,
        has_plain: bool = False,
        row_per_token: float | None = None,
    ) -> None:
        # Of a draft step, over the tokens of context that its rows read.
        self._draft = _FadingLine(step, row_per_token)
        self._request_reads = request_reads
        self._token: float | None = None
        self._enqueue: float | None = None
        # Of a step without drafts, over that of a draft step which reads the same bytes.
        self._plain: float | None = 1.0 if has_plain else None
        self._rounds_without_drafts = 0
        # Of a draft step, by the number of requests that drafted.
        self.draft_step_s: dict[int, float] = {}
        self.verify_s = 0.0
        self.plain_step_s = 0.0

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
        enqueue_s: float | None = 0.0,
    ) -> None:
        """A round of these lengths, over a mean context of so many tokens, took so long; enqueue_s:
        after which the device had been given all of it, None where that waited for other work."""
        steps, drafted = max(draft_lens, default=0), sum(draft_lens)
        if steps:
            if not self.has_measured:
                self._draft.forget()
                self._token = self._enqueue = None
            if enqueue_s is not None:
                self._enqueue = _mean(self._enqueue, enqueue_s)
            self._draft.observe(drafted * max(context, 1.0) / steps, draft_s / steps)
            if self._plain is not None and self._plain > 1:
                # One that stalled by accident must not stop them for good, either.
                self._plain += PLAIN_FADE * (1 - self._plain)
            rows = sum(length > 0 for length in draft_lens)
            self.draft_step_s[rows] = _mean(self.draft_step_s.get(rows), draft_s / steps)
        self._rounds_without_drafts = 0 if steps else self._rounds_without_drafts + 1
        self.verify_s = _mean(self.verify_s or None, verify_s)
        if draft_lens and self._draft.weight:
            without_tokens = replace(self.cost(context), token=0.0, plain=None)
            known = without_tokens.seconds([0] * len(draft_lens))
            per_token = max(0.0, verify_s - known) / (drafted + len(draft_lens))
            if enqueue_s is not None and enqueue_s < ENQUEUED_SHARE * (draft_s + verify_s):
                self._token = _mean(self._token, per_token)
            elif self._token is not None:
                # It may have waited for the CPU: tokens cost no more than this, or nothing.
                self._token = min(self._token, per_token)

    def cost(self, context: float) -> RoundCost:
        """Of a round over a mean context of so many tokens."""
        step, per_token = self._draft.fit()
        row = per_token * context
        request = row * self._request_reads
        costs = (step, row, request, self._token or 0.0)
        return RoundCost(*costs, self._plain, self._enqueue or 0.0)

    def observe_plain(self, num_requests: int, context: float, step_s: float) -> None:
        """A step without drafts of so many requests over a mean context took so long."""
        self._rounds_without_drafts += 1
        self.plain_step_s = _mean(self.plain_step_s or None, step_s)
        cost = self.cost(context)
        if known := cost.step + cost.request * num_requests:
            self._plain = _mean(self._plain, step_s / known)


class _FadingLine:
    """y = start + slope * x, both >= 0, by least squares over measurements that fade and over one
    at x = 0, the guess, that does not, and one at FAR where the slope is guessed, too."""

    def __init__(self, guess: float, slope: float | None = None) -> None:
        self._guess = guess
        self._slope = slope
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
        x, xx, xy = self._x, self._xx, self._xy
        if self._slope is not None:
            far_y = self._guess + self._slope * FAR
            weight, y = weight + FAR_WEIGHT, y + FAR_WEIGHT * far_y
            x, xx, xy = (
                x + FAR_WEIGHT * FAR,
                xx + FAR_WEIGHT * FAR**2,
                xy + FAR_WEIGHT * FAR * far_y,
            )
        spread = weight * xx - x**2
        slope = max(0.0, (weight * xy - x * y) / spread) if spread > 0 else 0.0
        start = (y - slope * x) / weight
        return (start, slope) if start >= 0 else (0.0, xy / xx)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
