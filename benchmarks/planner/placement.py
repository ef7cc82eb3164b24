"""Places for a request's next verification and the fetch before it (VeriCache section 5.2, ADMIT).

Two things differ from the paper. A fetch takes all that the link has left in each iteration of its
span. So the link can be filled to the last byte, while whole iterations would be rounded up. A
fetch ends one iteration before its verification, because that forward needs all residuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from planner.rings import Rings
from sglang_kvspec.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ask:
    """Demand of a request for its next verification.

    fetch_bytes: residuals to fetch into HBM for it; 0 if they are resident. best_len: best number
    of drafts to verify. num_drafts: drafts that the request has when it asks. priority: higher goes
    first. deadline: iteration by which its user should see tokens.
    """

    request_id: int
    fetch_bytes: int
    best_len: int
    num_drafts: int = 0
    priority: int = 0
    deadline: int | None = None

    def __post_init__(self) -> None:
        if self.fetch_bytes < 0 or self.best_len < 1 or self.num_drafts < 0:
            raise ConfigError(
                "fetch_bytes and num_drafts must be >= 0 and best_len >= 1, "
                f"got fetch_bytes={self.fetch_bytes}, num_drafts={self.num_drafts}, "
                f"best_len={self.best_len}"
            )


@dataclass(frozen=True, slots=True)
class Place:
    """A reservation, in absolute iterations.

    moves: (iteration, bytes) of the link, in time order. The bytes stay in HBM from the first move
    to `verify_at`, both included.
    """

    request_id: int
    verify_at: int
    fetch_bytes: int
    moves: tuple[tuple[int, int], ...] = ()

    @property
    def first(self) -> int:
        """Return the first iteration in which this place holds anything."""
        return self.moves[0][0] if self.moves else self.verify_at


class Outcome(Enum):
    PLACED = auto()
    WAITING = auto()
    # The request does not fit empty rings: keep its residuals resident, stream them, or decode it
    # without drafts.
    TOO_LARGE = auto()


@dataclass(frozen=True, slots=True)
class Decision:
    request_id: int
    outcome: Outcome
    place: Place | None = None


def offsets_to_try(best: int, least: int, most: int) -> Iterator[int]:
    """Yield best, best - 1, best + 1, best - 2, ... within least..most."""
    best = min(max(best, least), most)
    yield best
    for distance in range(1, max(best - least, most - best) + 1):
        if best - distance >= least:
            yield best - distance
        if best + distance <= most:
            yield best + distance


def find_place(
    rings: Rings, ask: Ask, num_drafts: int, now: int, max_draft_len: int
) -> Place | None:
    """Return the place nearest to the best draft length at which every ring has room, or None.

    num_drafts: drafts that the request has by now. Verifications lie 1..max_draft_len iterations
    ahead, or further if the fetch alone takes longer. A request that has drafts and needs no fetch
    may also verify at once.
    """
    most = min(max(max_draft_len, shortest_fetch(rings, ask.fetch_bytes)), rings.horizon - 1)
    least = 0 if num_drafts and not ask.fetch_bytes else 1
    best = ask.best_len - num_drafts
    if ask.deadline is not None:
        best = min(best, ask.deadline - now)
    for offset in offsets_to_try(best, least, most):
        if rings.slots.free(offset) < 1:
            continue
        moves = moves_before(rings, offset, ask.fetch_bytes)
        if moves is not None:
            at = tuple((now + when, amount) for when, amount in moves)
            return Place(ask.request_id, now + offset, ask.fetch_bytes, at)
    return None


def find_again(rings: Rings, place: Place, now: int) -> Place | None:
    """Return a place for a released reservation: the old one, or the first after it at which every
    ring has room. Return None if there is none."""
    for offset in range(max(place.verify_at - now, 0), rings.horizon):
        if rings.slots.free(offset) < 1:
            continue
        moves = moves_before(rings, offset, place.fetch_bytes)
        if moves is not None:
            at = tuple((now + when, amount) for when, amount in moves)
            return replace(place, verify_at=now + offset, moves=at)
    return None


def moves_before(
    rings: Rings, verify_offset: int, num_bytes: int
) -> tuple[tuple[int, int], ...] | None:
    """Return moves (offset, bytes) that fetch num_bytes as late as the link allows, or None.

    Return None also if HBM cannot hold num_bytes from the first move through the verification.
    """
    if num_bytes == 0:
        return ()
    if rings.hbm.free(verify_offset) < num_bytes:
        return None
    moves: list[tuple[int, int]] = []
    left = num_bytes
    for offset in range(verify_offset - 1, -1, -1):
        if rings.hbm.free(offset) < num_bytes:
            return None
        amount = min(left, rings.link.free(offset))
        if amount > 0:
            moves.append((offset, amount))
            left -= amount
        if left == 0:
            return tuple(reversed(moves))
    return None


def is_too_large(rings: Rings, ask: Ask) -> bool:
    """Return True if the request could not be placed on empty rings either."""
    if rings.slots.capacity < 1:
        return True
    if ask.fetch_bytes == 0:
        return False
    out_of_reach = shortest_fetch(rings, ask.fetch_bytes) > rings.horizon - 1
    return out_of_reach or ask.fetch_bytes > rings.hbm.capacity


def reserve(rings: Rings, place: Place, now: int) -> None:
    rings.slots.add(place.verify_at - now, 1)
    for when, amount in place.moves:
        rings.link.add(when - now, amount)
    for when in range(place.first, place.verify_at + 1) if place.moves else ():
        rings.hbm.add(when - now, place.fetch_bytes)


def release(rings: Rings, place: Place, now: int) -> None:
    """Undo `reserve` for the current iteration and all later ones."""
    rings.slots.remove(place.verify_at - now, 1)
    for when, amount in place.moves:
        if when >= now:
            rings.link.remove(when - now, amount)
    for when in range(max(place.first, now), place.verify_at + 1) if place.moves else ():
        rings.hbm.remove(when - now, place.fetch_bytes)


def shortest_fetch(rings: Rings, num_bytes: int) -> int:
    """Return the iterations that moving num_bytes takes on an empty link, or the horizon if the
    link moves nothing."""
    if num_bytes == 0:
        return 0
    if rings.link.capacity < 1:
        return rings.horizon
    return -(-num_bytes // rings.link.capacity)
