"""Costs of rounds, learnt from measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_kvspec.planning.rounds import RoundCost

# Weight of a new measurement in a running mean.
WEIGHT = 0.2
# Weight of the guess, relative to the newest measurement.
GUESS_WEIGHT = 0.25
# Tokens of context at which a guessed slope counts as a measurement, and the weight of that.
FAR = 100_000.0
FAR_WEIGHT = 0.05
# Rounds without drafts after which the cost of drafts is measured again.
ROUNDS_BEFORE_RETRY = 64
# Best time of a step without drafts, relative to what its reads should take. While such
# steps are not tried, their estimate fades to that time, at this rate: a measurement at another
# context, or a disturbed one, must not stop such steps for good.
PLAIN_BEST, PLAIN_FADE = 0.7, 0.02
# Rate at which the estimate of what verifications read goes back to its first value. Kernels of
# verifications may reach more of the memory's bandwidth.
READS_FADE = 0.02
# Rate at which the size of the largest verification is forgotten.
LARGEST_FADE = 0.02
# Least share of a verification that is left to run once all of it is enqueued. If less is left, the
# device waited for the CPU. Otherwise the CPU waited for room in the device's queue.
LEAST_LEFT = 0.15


class RoundCostModel:
    """Running means of the times of rounds, in seconds.

    step: seconds of a draft step without context, measured at the start or guessed. request_reads:
    bytes of a context that a verification reads, over those of its anchors. The ratio
    falls if verifications turn out to read more bytes a second. has_plain: True if steps without
    drafts are not verifications, and observe_plain() is called for them. row_per_token: guess of
    the seconds that a token that is read adds to a draft step, used until more are read.
    piggyback: True if requests piggyback drafts on verifications. target_step: seconds of a forward
    of the target without context, where drafts read smaller weights; never less than a draft step.
    """

    def __init__(
        self,
        step: float,
        request_reads: float,
        *,
        has_plain: bool = False,
        row_per_token: float | None = None,
        piggyback: bool = False,
        target_step: float = 0.0,
    ) -> None:
        self._piggyback = piggyback
        self._target_step = target_step
        # Seconds of a draft step, over the tokens that its rows read.
        self._draft = _FadingLine(step, row_per_token)
        self._most_reads = self._request_reads = request_reads
        self._token = _FadingRatio()
        self._enqueue: float | None = None
        self._between: float | None = None
        # Time of a step without drafts, relative to what its reads should take.
        self._plain: float | None = 1.0 if has_plain else None
        self._rounds_without_drafts = 0
        # Seconds of a draft step, by the number of requests that drafted.
        self.draft_step_s: dict[int, float] = {}
        self.verify_s = 0.0
        self.plain_step_s = 0.0

    @property
    def has_measured(self) -> bool:
        """Return True if a round with drafts was observed lately. An old cost of drafts, measured
        at another context or disturbed, must not stop drafts for good."""
        return self._draft.weight > 0 and self._rounds_without_drafts < ROUNDS_BEFORE_RETRY

    @property
    def between_s(self) -> float:
        return self._between or 0.0

    @property
    def enqueue_s(self) -> float:
        return self._enqueue or 0.0

    def observe(
        self,
        draft_lens: Sequence[int],
        context: float,
        draft_s: float,
        verify_s: float,
        enqueue_s: float | None = 0.0,
        verified_lens: Sequence[int] | None = None,
        between_s: float | None = None,
        num_piggyback: int = 0,
        read: float | None = None,
    ) -> None:
        """Learn from a round with these draft lengths. context: mean tokens of a request. read: how
        many of them a draft reads, all unless given.

        enqueue_s: seconds until all of the round was enqueued, None where that waited for other
        work. verified_lens: drafts of each request that verified, draft_lens unless given.
        between_s: seconds for which the device had waited for this round, None where not known.
        num_piggyback: requests that piggybacked a draft on the verification.
        """
        verified_lens = draft_lens if verified_lens is None else verified_lens
        steps, drafted = max(draft_lens, default=0), sum(draft_lens)
        if steps:
            if not self.has_measured:
                self._draft.forget()
                self._token, self._enqueue = _FadingRatio(), None
            tokens = context if read is None else read
            self._draft.observe(drafted * max(tokens, 1.0) / steps, draft_s / steps)
            if self._plain is not None and self._plain > PLAIN_BEST:
                self._plain += PLAIN_FADE * (PLAIN_BEST - self._plain)
            rows = sum(length > 0 for length in draft_lens)
            self.draft_step_s[rows] = _mean(self.draft_step_s.get(rows), draft_s / steps)
        self._rounds_without_drafts = 0 if steps else self._rounds_without_drafts + 1
        if between_s is not None:
            self._between = _mean(self._between, between_s)
        if not verified_lens:
            return
        had_to_wait = False
        if enqueue_s is not None:
            had_to_wait = draft_s + verify_s - enqueue_s < LEAST_LEFT * verify_s
            if had_to_wait:
                self._enqueue = _mean(self._enqueue, enqueue_s)
            elif self._enqueue is not None:
                self._enqueue = min(self._enqueue, enqueue_s)
        self.verify_s = _mean(self.verify_s or None, verify_s)
        if self._draft.weight:
            cost = replace(self.cost(context, read), token=0.0, plain=None)
            without_tokens = replace(cost, enqueue=0.0, between=0.0)
            known = without_tokens.seconds([0] * len(verified_lens)) + num_piggyback * cost.row
            self._observe_reads(verify_s - known, cost.request * len(verified_lens))
            num_tokens = sum(verified_lens) + len(verified_lens)
            excess_s = max(0.0, verify_s - known)
            if enqueue_s is not None and not had_to_wait:
                self._token.observe(num_tokens, excess_s)
            else:
                # The device may have waited for the CPU: this time per token is an upper bound.
                self._token.lower_to(excess_s / num_tokens)

    def _observe_reads(self, excess_s: float, reads_s: float) -> None:
        """Learn from a verification. excess_s: its seconds beyond those expected without tokens,
        negative if it took less. reads_s: expected seconds of its reads."""
        self._request_reads += READS_FADE * (self._most_reads - self._request_reads)
        if excess_s < 0 < reads_s:
            share = max(0.0, 1 + excess_s / reads_s)
            self._request_reads = _mean(self._request_reads, share * self._request_reads)

    def cost(self, context: float, read: float | None = None) -> RoundCost:
        """Return the costs of a round. context, read: as for observe()."""
        step, per_token = self._draft.fit()
        row = per_token * (context if read is None else read)
        request = per_token * context * self._request_reads
        return RoundCost(
            step,
            row,
            request,
            self._token.value,
            plain=self._plain,
            enqueue=self.enqueue_s,
            between=self.between_s,
            piggyback=self._piggyback,
            target_step=self._target_step,
        )

    def observe_plain(self, num_requests: int, context: float, step_s: float) -> None:
        """Learn from a step without drafts. context: mean tokens of a request."""
        self._rounds_without_drafts += 1
        self.plain_step_s = _mean(self.plain_step_s or None, step_s)
        cost = self.cost(context)
        if known := cost.target + cost.request * num_requests:
            self._plain = _mean(self._plain, step_s / known)


class _FadingLine:
    """Line y = start + slope * x, both >= 0, by least squares over fading measurements. The guess
    counts as a measurement at x = 0, and as one at FAR if the slope is guessed, too; it does not
    fade."""

    def __init__(self, guess: float, slope: float | None = None) -> None:
        self._guess = guess
        self._slope = slope
        self.forget()

    def forget(self) -> None:
        """Forget all measurements, and keep the guess."""
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        # No step is faster than one without context: the guess is a lower bound of y.
        self._guess = min(self._guess, y)
        keep = 1 - WEIGHT
        self.weight = keep * self.weight + 1
        self._x = keep * self._x + x
        self._y = keep * self._y + y
        self._xx = keep * self._xx + x * x
        self._xy = keep * self._xy + x * y

    def fit(self) -> tuple[float, float]:
        """Return (start, slope)."""
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


class _FadingRatio:
    """Ratio of two sums of measurements. What is measured counts by its size, and makes older
    measurements fade by its size, too. Otherwise the rounds of a last request, with few tokens and
    all that is wrong with the rest of the model, would decide the cost of tokens for the batch
    after it."""

    def __init__(self) -> None:
        self._parts = self._whole = self._largest = 0.0

    @property
    def value(self) -> float:
        return self._whole / self._parts if self._parts else 0.0

    def observe(self, parts: float, whole: float) -> None:
        self._largest = max(parts, (1 - LARGEST_FADE) * self._largest)
        keep = (1 - WEIGHT) ** (parts / self._largest)
        self._parts = keep * self._parts + parts
        self._whole = keep * self._whole + whole

    def lower_to(self, ratio: float) -> None:
        self._whole = min(self._whole, ratio * self._parts)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
