"""Decode rate of passes: tokens while every request decodes, without prefill and stragglers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from acceptance.report import Estimate

from serving.records import DecodeRate

# A window shorter than this share of the time in which any request decodes says little.
LEAST_WINDOW = 0.25
_BLOCKS = 8


def decode_rate(ttfts: Sequence[float], itls: Sequence[Sequence[float]]) -> DecodeRate | None:
    """Return the decode rate of requests that were sent at once. ttfts: seconds to the first token
    of each request. itls: seconds between its tokens.

    The window reaches from the last first token to the first last token. The spread is that of the
    mean over eight parts of the window. If requests had to wait for each other, the rate covers the
    whole time from the first token on. Return None if nothing was decoded.
    """
    times = [list(accumulate(gaps, initial=ttft)) for ttft, gaps in zip(ttfts, itls, strict=True)]
    begin, end = max(ttfts), min(request[-1] for request in times)
    first, last = min(ttfts), max(request[-1] for request in times)
    if last <= first:
        return None
    if end - begin < LEAST_WINDOW * (last - first):
        tokens = sum(len(gaps) for gaps in itls)
        return DecodeRate(tokens / (last - first), None, steady=False)
    length = (end - begin) / _BLOCKS
    counts = [0] * _BLOCKS
    for request in times:
        for time in request:
            if begin < time <= end:
                counts[min(int((time - begin) / length), _BLOCKS - 1)] += 1
    estimate = Estimate.of(torch.tensor(counts) / length)
    return DecodeRate(estimate.mean, estimate.half_width, steady=True)


def rate_of_passes(rates: Sequence[DecodeRate]) -> DecodeRate:
    """Return the rate of passes with as many tokens each, one after the other: all tokens over all
    time. With several passes the spread is that of the time of a token over them."""
    if len(rates) == 1:
        return rates[0]
    times = Estimate.of(torch.tensor([1 / rate.tokens_per_s for rate in rates]))
    spread = times.half_width / times.mean**2
    return DecodeRate(1 / times.mean, spread, steady=all(rate.steady for rate in rates))
