"""Which requests keep their residuals in HBM instead of fetching them for every verification."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

# A resident request's value counts this much more. The values of two requests that verify equally
# often differ by at most 4/3, from one that is about to verify to one that just did; anything above
# keeps them from trading places in every cycle.
STAY_FACTOR = 1.5
# Verifications looked ahead.
LOOKAHEAD_CYCLES = 4


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """residual_bytes: of all its pages. next_use: iterations until it next verifies. cycle_len:
    iterations from one verification to the next."""

    request_id: int
    residual_bytes: int
    next_use: int
    cycle_len: int
    is_resident: bool

    @property
    def value(self) -> float:
        """Verifications per iteration that residency serves, over the next few cycles.

        A verification saves moving exactly the bytes that residency holds, so that per byte only
        its frequency and nearness count.
        """
        lookahead = LOOKAHEAD_CYCLES * max(self.cycle_len, 1)
        uses = max(lookahead - self.next_use, 0) / max(self.cycle_len, 1)
        return uses / lookahead


def num_resident(
    num_requests: int, pages_each: int, cycle_len: float, num_slots: int, link_pages: int
) -> int:
    """How many of alike requests keep their residuals in a cache that does not hold them all, so
    that most verifications come in an iteration; of equals the most, which leave the link alone.

    A resident request verifies once in a cycle of cycle_len iterations. The others do, too, as far
    as the link brings their pages, link_pages an iteration, and the cache has rooms for them: one
    is taken from the iteration in which a fetch begins to the one that verifies with it. One room
    is always left.
    """
    assert min(num_requests, pages_each, link_pages) > 0
    taken = ceil(pages_each / link_pages) + 1

    def verifications(resident: int) -> float:
        rooms = num_slots // pages_each - resident
        fetching = min(
            (num_requests - resident) / cycle_len, link_pages / pages_each, rooms / taken
        )
        # Sums of the same in another order are the same.
        return round(resident / cycle_len + fetching, 9)

    most = min(num_requests, max(num_slots // pages_each - 1, 0))
    return max(range(most + 1), key=lambda resident: (verifications(resident), resident))


def choose_resident(requests: Collection[ResidencyView], spare_bytes: int) -> frozenset[int]:
    """The requests whose residuals stay in, or may take, spare_bytes of HBM.

    By value, residents ahead of others of up to STAY_FACTOR times theirs; what does not fit is
    passed over for what does.
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
