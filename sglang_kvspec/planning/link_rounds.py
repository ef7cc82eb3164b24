"""How long requests draft before they verify where a link brings residuals for it, turn by turn.

The longer a round, the more requests can have verified by its end, until the cache holds no more of
their residuals; and the more drafts each of them has by then. So its length decides how often a
request verifies, other than where everybody always does (rounds.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_kvspec.planning.rounds import RoundCost, RoundRequest

# Numbers of requests that stay, of which the best is looked for.
MOST_TRIED = 16


@dataclass(frozen=True, slots=True)
class Turns:
    """What a round's verifications need of the link. staying: requests whose residuals stay in the
    cache, and which verify in every round. most: others that it holds beside them. fetch_s: seconds
    that the link needs for one of these."""

    staying: int
    most: float
    fetch_s: float


@dataclass(frozen=True, slots=True)
class LinkShare:
    """share: of the speed that the same num_requests requests had with all residuals in the cache,
    what a link lets them have. reason: why it is not more, in one line."""

    share: float
    num_requests: int
    reason: str


class TurnLens(NamedTuple):
    """lens: drafts that each request adds. price: expected tokens that a draft must be worth."""

    lens: list[int]
    price: float


def plan_turns(requests: Sequence[RoundRequest], cost: RoundCost, turns: Turns) -> TurnLens:
    """How many drafts each request adds to those it has: the same number for all, with the most
    expected tokens a second, less for those to whom so many are worth less than they cost.

    What drafts beside a verification take counts, not what they add. With that, the shortest rounds
    would seem the best, in which requests verify again while their residuals are still there, with
    next to no drafts (8B, 16 requests of 32K on an H200: 657 tokens/s instead of 993).
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
    """Of rounds of the best length, with the best number of requests that stay, where the link
    never stands still and every request is like the mean of them. held: requests, at least 1, whose
    residuals the cache holds at once. fetch_s: seconds that the link needs for all residuals of
    one. Quick enough to be asked for while requests wait."""
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
        f"of {num} requests the cache holds the residuals of {held:.1f}, and the link "
        f"brings those of {1 / fetch_s:.0f} a second: {rate:.0f} tokens/s if it never stood still, "
        f"{share:.2f} of the {resident:.0f} that rounds of the same cost give with all of them in "
        "GPU memory"
    )
    return LinkShare(share, num, reason)


def _rate(
    kinds: Sequence[tuple[RoundRequest, int]],
    cost: RoundCost,
    turns: Turns,
    length: int,
    added: float,
) -> float:
    """Expected tokens a second of all requests together where each adds `length` drafts a round,
    and `added` beside a verification at which it has no turn. kinds: requests, and how many there
    are like each."""
    num = sum(count for _, count in kinds)
    staying = min(turns.staying, num)
    others = num - staying
    lens = [length] * num
    # Who verifies makes a round longer, which gives the link time for more.
    seconds = cost.seconds(lens, staying)
    fetching = 0.0
    cap = sum(request.cap_len * count for request, count in kinds) / max(num, 1)
    for _ in range(3):
        fetching = min(others, turns.most, seconds / turns.fetch_s)
        # Drafts of a round that those who have all they can use do not make.
        idle = max(others * length - cap * fetching, 0.0)
        seconds = cost.seconds(lens, staying + fetching) - idle * (cost.row + cost.token)
        seconds = max(seconds, fetching * turns.fetch_s)
    if not others:
        return sum(count * _tokens(request, length) for request, count in kinds) / seconds
    # Nobody waits for ever, whatever the link.
    interval = others / max(fetching, 1e-6)
    share_staying = staying / num
    # In a round without any verification there is nothing to draft beside.
    added *= min(1.0, staying + fetching)
    tokens = 0.0
    for request, count in kinds:
        tokens += count * share_staying * _tokens(request, length)
        made = length * interval + added * (interval - 1)
        tokens += count * (1 - share_staying) * _tokens(request, made) / interval
    return tokens / seconds


def _tokens(request: RoundRequest, num_drafts: float) -> float:
    """Expected of a verification of so many drafts, as far as its cap allows them (Leviathan et al.
    2023, equation 1)."""
    p = request.probability
    return float((1 - p ** (min(num_drafts, request.cap_len) + 1)) / (1 - p))


def _worth_while(request: RoundRequest, length: int, price: float) -> int:
    room, worth = min(length, request.room), request.next_worth
    for count in range(room):
        if worth <= price:
            return count
        worth *= request.probability
    return room
