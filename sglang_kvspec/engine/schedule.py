"""What a verify scheduler decides about one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_kvspec.planning.round_plan import RoundBudget


@dataclass(frozen=True, slots=True)
class RoundSchedule:
    """lens: drafts that each request adds before the round's verifications. budget: residual pages
    that the link moves meanwhile. held: requests that are not to verify yet. may_advance: whether a
    round in which no request drafts may take tokens at the target precision instead. alone: drafts
    that each request adds in place of lens where no request verifies; empty for lens."""

    lens: list[int]
    budget: RoundBudget
    held: frozenset[int] = frozenset()
    may_advance: bool = True
    alone: Sequence[int] = ()
