"""Selection of requests that keep residuals in HBM instead of fetching them for verifications."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

# Factor on the value of a resident request. The values of two requests that verify equally often
# differ by at most 4/3, if one is about to verify and the other just did. A factor above 4/3 keeps
# them from trading places in every cycle.
STAY_FACTOR = 1.5
# Number of verifications that a value looks ahead.
LOOKAHEAD_CYCLES = 4


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """Request that may keep its residuals in HBM. residual_bytes: of all its pages. next_use:
    iterations until its next verification. cycle_len: iterations from one verification to the
    next."""

    request_id: int
    residual_bytes: int
    next_use: int
    cycle_len: int
    is_resident: bool

    @property
    def value(self) -> float:
        """Verifications per iteration that residency serves, over the next few cycles.

        Residency saves each verification exactly the bytes that it holds. So per byte, only how
        often and how soon the request verifies counts.
        """
        lookahead = LOOKAHEAD_CYCLES * max(self.cycle_len, 1)
        uses = max(lookahead - self.next_use, 0) / max(self.cycle_len, 1)
        return uses / lookahead


def num_resident(
    num_requests: int, pages_each: int, cycle_len: float, num_slots: int, link_pages: int
) -> int:
    """Return how many of num_requests equal requests keep their residuals in a cache that does not
    hold all. The number gives the most verifications an iteration; of several such numbers, the
    largest, which uses the link least.

    A resident request verifies once in a cycle of cycle_len iterations. The others do, too, as far
    as the link brings their pages, link_pages an iteration, and the cache has rooms of pages_each
    slots for them. A fetch takes a room from its first iteration to the one that verifies with it.
    One room is always left.
    """
    assert min(num_requests, pages_each, link_pages) > 0
    taken = ceil(pages_each / link_pages) + 1

    def verifications(resident: int) -> float:
        rooms = num_slots // pages_each - resident
        fetching = min(
            (num_requests - resident) / cycle_len, link_pages / pages_each, rooms / taken
        )
        # Rounding makes sums of the same terms in another order equal.
        return round(resident / cycle_len + fetching, 9)

    most = min(num_requests, max(num_slots // pages_each - 1, 0))
    return max(range(most + 1), key=lambda resident: (verifications(resident), resident))


def choose_resident(requests: Collection[ResidencyView], spare_bytes: int) -> frozenset[int]:
    """Return the requests whose residuals stay in, or may take, spare_bytes of HBM.

    Requests go by value, and a resident request goes before others of up to STAY_FACTOR times its
    value. A request that does not fit is skipped for one that does.
    """
    chosen = []
    left = spare_bytes
    for request in sorted(requests, key=_order):
        if request.residual_bytes <= left:
            chosen.append(request.request_id)
            left -= request.residual_bytes
    return frozenset(chosen)


def _order(request: ResidencyView) -> tuple[float, int]:
    value = request.value * (STAY_FACTOR if request.is_resident else 1.0)
    return (-value, request.request_id)
