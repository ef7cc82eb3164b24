"""Draft lengths of a round in which requests take turns, because a link brings their residuals.

At the end of a longer round, each request has more drafts. More requests can verify, too, until the
cache holds no more residuals. So the length of a round decides how often a request verifies. In
rounds.py, all requests always verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_kvspec.planning.rounds import RoundCost, RoundRequest

# Most numbers of staying requests that share_of_speed() compares.
MOST_TRIED = 16


@dataclass(frozen=True, slots=True)
class Turns:
    """Link needs of a round's verifications. staying: requests whose residuals stay in the cache,
    and which verify in every round. most: other requests that the cache holds beside them. fetch_s:
    seconds that the link needs for one of these others."""

    staying: int
    most: float
    fetch_s: float


@dataclass(frozen=True, slots=True)
class LinkShare:
    """Speed that a link allows. share: relative to the same num_requests requests with all
    residuals in the cache. reason: why the share is not larger, in one line."""

    share: float
    num_requests: int
    reason: str


class TurnLens(NamedTuple):
    """Draft lengths of a round. lens: drafts that each request adds. price: expected tokens that a
    draft must be worth."""

    lens: list[int]
    price: float


def plan_turns(requests: Sequence[RoundRequest], cost: RoundCost, turns: Turns) -> TurnLens:
    """Return how many drafts each request adds, for the most expected tokens a second. The number
    is the same for all, but smaller for requests whose further drafts cost more than their worth.

    The time of piggyback drafts counts, but not the tokens that they add. Otherwise the shortest
    rounds would seem best, in which requests verify again while their residuals are still in the
    cache, with next to no drafts.
    """
    longest = max((request.cap_len for request in requests), default=0)
    kinds = [(request, 1) for request in requests]
    rates = [_rate(kinds, cost, turns, length, 0.0) for length in range(longest + 1)]
    rate = max(rates)
    length = rates.index(rate)
    price = rate * (cost.row + cost.token)
    return TurnLens([_worth_while(request, length, price) for request in requests], price)


def share_of_speed(
    requests: Sequence[RoundRequest], cost: RoundCost, held: float, fetch_s: float
) -> LinkShare:
    """Return the share of speed that the link allows, in rounds of the best length and with the
    best number of staying requests. The estimate takes a link that never idles, and requests that
    all equal their mean. held: requests, at least 1, whose residuals the cache holds at once.
    fetch_s: seconds that the link needs for all residuals of one request. Fast enough to call while
    requests wait."""
    num = len(requests)
    probability = sum(request.probability for request in requests) / num
    longest = max(request.cap_len for request in requests)
    alike = [(RoundRequest(probability, longest), num)]

    def best_rate(turns: Turns) -> float:
        added = float(cost.piggyback)
        return max(_rate(alike, cost, turns, length, added) for length in range(longest + 1))

    resident = best_rate(Turns(num, 0.0, fetch_s))
    whole = min(int(held), num)
    rate = max(
        best_rate(Turns(staying, held - staying, fetch_s))
        for staying in range(0, whole, -(-whole // MOST_TRIED))
    )
    share = min(rate / resident, 1.0)
    reason = (
        f"the residual cache holds the residuals of {held:.1f} of {num} requests, and the link "
        f"fetches those of {1 / fetch_s:.0f} requests a second: at most {rate:.0f} tokens/s, "
        f"{share:.2f} of the {resident:.0f} tokens/s with all residuals in GPU memory"
    )
    return LinkShare(share, num, reason)


def _rate(
    kinds: Sequence[tuple[RoundRequest, int]],
    cost: RoundCost,
    turns: Turns,
    length: int,
    added: float,
) -> float:
    """Return the expected tokens a second of all requests together. Each request adds `length`
    drafts a round, and `added` piggyback drafts on a verification at which it has no turn. kinds:
    requests, and how many there are like each."""
    num = sum(count for _, count in kinds)
    staying = min(turns.staying, num)
    others = num - staying
    lens = [length] * num
    # Verifications make a round longer, which gives the link time for more of them.
    seconds = cost.seconds(lens, staying)
    fetching = 0.0
    cap = sum(request.cap_len * count for request, count in kinds) / max(num, 1)
    for _ in range(3):
        fetching = min(others, turns.most, seconds / turns.fetch_s)
        # Drafts of a round that requests at their cap do not make.
        idle = max(others * length - cap * fetching, 0.0)
        seconds = cost.seconds(lens, staying + fetching) - idle * (cost.row + cost.token)
        seconds = max(seconds, fetching * turns.fetch_s)
    if not others:
        return sum(count * _tokens(request, length) for request, count in kinds) / seconds
    # The floor keeps waits finite, however slow the link is.
    interval = others / max(fetching, 1e-6)
    share_staying = staying / num
    # A round without a verification has no forward to piggyback on.
    added *= min(1.0, staying + fetching)
    tokens = 0.0
    for request, count in kinds:
        tokens += count * share_staying * _tokens(request, length)
        made = length * interval + added * (interval - 1)
        tokens += count * (1 - share_staying) * _tokens(request, made) / interval
    return tokens / seconds


def _tokens(request: RoundRequest, num_drafts: float) -> float:
    """Return the expected tokens of a verification of num_drafts drafts, or of as many as the cap
    allows (Leviathan et al. 2023, equation 1)."""
    p = request.probability
    return float((1 - p ** (min(num_drafts, request.cap_len) + 1)) / (1 - p))


def _worth_while(request: RoundRequest, length: int, price: float) -> int:
    room, worth = min(length, request.room), request.next_worth
    for count in range(room):
        if worth <= price:
            return count
        worth *= request.probability
    return room
