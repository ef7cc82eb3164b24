"""How many requests to run, how far to draft, and how much HBM to keep free for fetches.

VeriCache's model (appendix B.1) asks that residuals pass the link in time. The HBM ring asks for
more: a fetched residual takes room from its first byte until it is verified, so that few rooms let
the link run empty between fetches. Both limits are here; what is left of HBM keeps residuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from planner.simulation import Machine
from sglang_kvspec.planning.throughput import gpu_seconds

# Of the longest draft: beyond it a request whose place is taken finds few later ones, and waits.
LONGEST_SHARE = 0.75
# Of the link's time: nearer to all of it, fetches wait for one another.
LINK_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """num_requests: of which num_fetching have no room for their residuals. rooms: residuals of
    one request each that HBM keeps free for fetches. link_load: of the link's time, in use."""

    draft_len: int
    num_requests: int
    num_fetching: int
    rooms: int
    tokens_per_s: float
    iteration_s: float
    link_load: float


@dataclass(frozen=True, slots=True)
class Loading:
    """How residuals are loaded. The default is what schedules do; others are here to be weighed.

    span: iterations of a load over those the link needs, VeriCache's knob "cycles per load"
    (appendix B.1). It lightens nothing: all that a cycle loads has to pass the link in it (see
    `link_seconds`), and longer loads hold HBM for longer.

    verifications: that one load serves before its residuals leave (the "cached" verifiers of
    appendix B.2). With k of them, k requests take as much of the link, and on average of HBM, as
    k - 1 residents and one that loads for each: nothing is new but mixes of residents and others
    that whole requests do not make.

    keeps_pages: HBM too small for one more resident holds pages of those who fetch, which brings
    such mixes with one load a verification.
    """

    span: float = 1.0
    verifications: int = 1
    keeps_pages: bool = False


PLAIN_LOADING = Loading()


def choose_operating_point(
    machine: Machine, context_len: int, output_len: float, loading: Loading = PLAIN_LOADING
) -> OperatingPoint | None:
    """The fastest, for requests of context_len tokens that emit output_len more; None where plain
    decoding is as fast."""
    points = operating_points(machine, context_len, output_len, loading)
    best = max(points, key=lambda point: point.tokens_per_s, default=None)
    if best is None or best.tokens_per_s <= plain_tokens_per_s(machine, context_len):
        return None
    return best


def plain_tokens_per_s(machine: Machine, context_len: int) -> float:
    """Of as many requests as their plain KV lets in."""
    fitting = int(machine.kv_bytes / (context_len * machine.plain_bytes))
    num = min(fitting, machine.max_requests)
    return num / machine.costs.plain_seconds(num, num * context_len) if num else 0.0


def operating_points(
    machine: Machine, context_len: int, output_len: float, loading: Loading = PLAIN_LOADING
) -> Iterator[OperatingPoint]:
    """For each draft length and number of fetching requests, the one with the fewest rooms."""
    for draft_len in _draft_lens(max(1, int(machine.max_draft_len * LONGEST_SHARE))):
        tokens = machine.curve.expected_tokens(draft_len)
        # Nobody knows where an output ends: half of the last cycle's tokens, on average, are lost.
        kept = tokens / (1 + tokens / (2 * output_len))
        for num_fetching in range(machine.max_requests + 1):
            point = _fewest_rooms(machine, context_len, draft_len, num_fetching, kept, loading)
            if point is not None:
                yield point
            elif num_fetching:
                # More of them need more rooms still, or a longer draft.
                break


def _draft_lens(most: int) -> Iterator[int]:
    """Every length at first, then steps of an eighth: throughput is flat around its best."""
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
    """kept: tokens that a cycle brings a request, on average."""
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
        # A room is taken while its fetch moves and is verified. Of several fetches each begins in
        # the iteration in which another ends; a single room begins with an iteration of its own.
        taken = ceil(span * loading.span) + 1 if rooms == 1 else span * loading.span + 2
        taken += (loading.verifications - 1) * (draft_len + 1)
        if fetches * taken <= rooms:
            speed = num_requests * kept / (draft_len + 1) / seconds
            return OperatingPoint(
                draft_len, num_requests, num_fetching, rooms, speed, seconds, fetches * span
            )
        rooms += 1
    return None
