"""Counts of what drafts read of their context, of proposals, and of what became of drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class DraftCounts:
    """Counts of verified drafts, of one request or of all.

    context, read: tokens of context, summed over drafts, and how many of them the drafts read.
    weighed, mass: drafts of which it is known what share of the attention mass they read, and the
    sum of these shares. selection_s: seconds of scores and selections of pages, in rounds that
    verified these drafts. budgets: verifications and their drafts, by the share of pages that the
    drafts were to read. steps, proposing: draft steps that n-grams may propose to, one for each
    request in a forward, and those that they did propose to. proposed, kept: tokens that they
    proposed, and those that became drafts. step_ms: expected times of steps with and without
    proposals, of all requests only, by the number of requests.
    """

    context: int = 0
    read: int = 0
    weighed: int = 0
    mass: float = 0.0
    selection_s: float = 0.0
    budgets: dict[float, Counter[str]] = field(default_factory=dict)
    steps: int = 0
    proposing: int = 0
    proposed: int = 0
    kept: int = 0
    step_ms: dict[str, dict[str, float]] = field(default_factory=dict)

    def observe_step(self, num_proposed: int, num_kept: int) -> None:
        """Count a draft step of one request. It makes num_kept + 1 drafts."""
        self.steps += 1
        self.proposing += num_proposed > 0
        self.proposed += num_proposed
        self.kept += num_kept

    def observe_ordinary(self, num_steps: int) -> None:
        """Count draft steps of one request to which nothing was proposed, a draft each."""
        self.steps += num_steps

    def observe(
        self,
        num_drafts: int,
        num_accepted: int,
        budget: float,
        context: int,
        read: int,
        mass: float | None,
    ) -> None:
        """Count the drafts of one verification. context, read: tokens, of each draft. mass: share
        that each read; None if it is not known."""
        self.context += num_drafts * context
        self.read += num_drafts * read
        if mass is not None:
            self.weighed += num_drafts
            self.mass += num_drafts * mass
        at_budget = self.budgets.setdefault(budget, Counter())
        at_budget.update(verifications=1, drafted=num_drafts, accepted=num_accepted)

    def ngram_report(self) -> dict[str, Any]:
        """Return counts of proposals for meta_info and /server_info. tokens_per_step: drafts of a
        step, None before the first step."""
        return {
            "steps": self.steps,
            "proposing": self.proposing,
            "proposed": self.proposed,
            "kept": self.kept,
            "tokens_per_step": 1 + self.kept / self.steps if self.steps else None,
        }

    def report(self) -> dict[str, Any]:
        """Return the counts for meta_info and /server_info. share, mass: of their context that
        drafts read, and of the attention mass on it; None before the first draft, mass also where
        it is not known. by_budget: has shares as text, in order."""
        return {
            "share": self.read / self.context if self.context else None,
            "mass": self.mass / self.weighed if self.weighed else None,
            "selection_ms": self.selection_s * 1e3,
            "by_budget": {str(b): dict(c) for b, c in sorted(self.budgets.items())},
        }
