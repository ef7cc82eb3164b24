"""Counts of what drafts read of their context, and of what became of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class DraftCounts:
    """Counts of verified drafts, of one request or of all. context, read: tokens of context, summed
    over drafts, and how many of them the drafts read. budgets: verifications and their drafts, by
    the share of pages that the drafts were to read."""

    context: int = 0
    read: int = 0
    budgets: dict[float, Counter[str]] = field(default_factory=dict)

    def observe(
        self, num_drafts: int, num_accepted: int, budget: float, context: int, read: int
    ) -> None:
        """Count the drafts of one verification. context, read: tokens, of each draft."""
        self.context += num_drafts * context
        self.read += num_drafts * read
        at_budget = self.budgets.setdefault(budget, Counter())
        at_budget.update(verifications=1, drafted=num_drafts, accepted=num_accepted)

    def report(self) -> dict[str, Any]:
        """Return the counts for meta_info and /server_info. share: of their context that drafts
        read, None before the first draft. by_budget: has shares as text, in order."""
        return {
            "share": self.read / self.context if self.context else None,
            "by_budget": {str(b): dict(c) for b, c in sorted(self.budgets.items())},
        }
