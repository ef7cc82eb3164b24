"""Decisions of a verify scheduler about one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_kvspec.planning.round_plan import RoundBudget


@dataclass(frozen=True, slots=True)
class RoundSchedule:
    """Schedule of a round. lens: drafts that each request adds before the round's verifications.
    budget: residual pages that the link moves meanwhile. held: requests that must not verify yet.
    may_advance: True if a round in which no request drafts may take plain steps instead. alone:
    drafts that each request adds in place of lens where no request verifies; empty for lens."""

    lens: list[int]
    budget: RoundBudget
    held: frozenset[int] = frozenset()
    may_advance: bool = True
    alone: Sequence[int] = ()
