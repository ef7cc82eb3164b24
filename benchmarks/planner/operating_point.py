"""Choice of the number of requests, the draft length, and the HBM to keep free for fetches.

VeriCache's model (appendix B.1) requires that the link moves residuals in time. The HBM ring
requires more: a fetched residual takes room from its first byte until it is verified. With few
rooms, the link is idle between fetches. This module models both limits. Residuals stay in the rest
of HBM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from planner.simulation import Machine
from sglang_kvspec.planning.throughput import gpu_seconds

# Largest draft length, as a share of the longest possible one. With longer drafts, a request whose
# place is taken finds few later places, and waits.
LONGEST_SHARE = 0.75
# Largest share of the link's time in use: nearer to 1, fetches wait for each other.
LINK_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Settings of a schedule, and its expected speed.

    num_fetching: requests, out of num_requests, whose residuals do not stay in HBM. rooms: number
    of spaces that HBM keeps free for fetches, each for the residuals of one request. link_load:
    share of the link's time in use.
    """

    draft_len: int
    num_requests: int
    num_fetching: int
    rooms: int
    tokens_per_s: float
    iteration_s: float
    link_load: float


@dataclass(frozen=True, slots=True)
class Loading:
    """Way to load residuals. The default is what schedules do; other ways are for comparison.

    span: iterations of a load over those that the link needs, VeriCache's knob "cycles per load"
    (appendix B.1). A larger span does not relieve the link, which must move all loads of a cycle
    within the cycle (see `link_seconds` in planning/throughput.py). It also holds HBM for longer.

    verifications: number of verifications that one load serves before its residuals leave (the
    "cached" verifiers of appendix B.2). With k verifications per load, k requests cost as much as
    k - 1 residents and one request that loads for each verification. That holds for the link, and
    on average for HBM. The only gain is a mix of both kinds that whole requests cannot make.

    keeps_pages: HBM that is too small for one more resident holds pages of fetching requests. This
    allows such mixes with one load per verification.
    """

    span: float = 1.0
    verifications: int = 1
    keeps_pages: bool = False


PLAIN_LOADING = Loading()


def choose_operating_point(
    machine: Machine, context_len: int, output_len: float, loading: Loading = PLAIN_LOADING
) -> OperatingPoint | None:
    """Return the fastest point for requests of context_len tokens that emit output_len more. Return
    None if plain decoding is as fast."""
    points = operating_points(machine, context_len, output_len, loading)
    best = max(points, key=lambda point: point.tokens_per_s, default=None)
    if best is None or best.tokens_per_s <= plain_tokens_per_s(machine, context_len):
        return None
    return best


def plain_tokens_per_s(machine: Machine, context_len: int) -> float:
    """Return the speed of plain decoding, with as many requests as fit with plain KV."""
    fitting = int(machine.kv_bytes / (context_len * machine.plain_bytes))
    num = min(fitting, machine.max_requests)
    return num / machine.costs.plain_seconds(num, num * context_len) if num else 0.0


def operating_points(
    machine: Machine, context_len: int, output_len: float, loading: Loading = PLAIN_LOADING
) -> Iterator[OperatingPoint]:
    """Yield, for each draft length and number of fetching requests, the point with the fewest
    rooms."""
    for draft_len in _draft_lens(max(1, int(machine.max_draft_len * LONGEST_SHARE))):
        tokens = machine.curve.expected_tokens(draft_len)
        # The end of an output is not known: on average, half of the last cycle's tokens are lost.
        kept = tokens / (1 + tokens / (2 * output_len))
        for num_fetching in range(machine.max_requests + 1):
            point = _fewest_rooms(machine, context_len, draft_len, num_fetching, kept, loading)
            if point is not None:
                yield point
            elif num_fetching:
                # More fetching requests would need still more rooms, or a longer draft.
                break


def _draft_lens(most: int) -> Iterator[int]:
    """Yield every length up to 16, then lengths in steps of an eighth: throughput is flat around
    its best."""
    draft_len = 1
    while draft_len <= most:
        yield draft_len
        draft_len += max(1, draft_len // 8)


def _fewest_rooms(
    machine: Machine,
    context_len: int,
    draft_len: int,
    num_fetching: int,
    kept: float,
    loading: Loading,
) -> OperatingPoint | None:
    """Return the point with the fewest rooms that keep up with the fetches, or None if the link or
    HBM is too small. kept: tokens that a cycle brings a request, on average."""
    always = context_len * machine.anchor_bytes + machine.window_bytes
    residual = context_len * machine.residual_bytes
    rooms = 1 if num_fetching else 0
    while (left := machine.kv_bytes - num_fetching * always - rooms * residual) >= 0:
        num_resident = min(int(left / (always + residual)), machine.max_requests - num_fetching)
        num_requests = num_fetching + num_resident
        if not num_requests:
            return None
        seconds = gpu_seconds(machine.costs, num_requests, context_len, draft_len)
        missing = residual
        if loading.keeps_pages and num_fetching:
            unused = left - num_resident * (always + residual)
            missing = max(residual - unused / num_fetching, 0.0)
        span = missing / (machine.link_bytes_per_s * seconds)
        fetches = num_fetching / ((draft_len + 1) * loading.verifications)
        if fetches * span > LINK_SHARE:
            return None
        # A room is taken while its fetch moves and is verified. With several rooms, a fetch begins
        # in the iteration in which another ends. With one, it begins in an iteration of its own.
        taken = ceil(span * loading.span) + 1 if rooms == 1 else span * loading.span + 2
        taken += (loading.verifications - 1) * (draft_len + 1)
        if fetches * taken <= rooms:
            speed = num_requests * kept / (draft_len + 1) / seconds
            return OperatingPoint(
                draft_len, num_requests, num_fetching, rooms, speed, seconds, fetches * span
            )
        rooms += 1
    return None
