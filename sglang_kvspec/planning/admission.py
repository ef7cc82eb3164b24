"""Admission of a waiting request, which must not cause a retraction soon.

A page of the pool is a budget of three things at once. The capacity plan gives every page an
anchor and a row of the residual store, and every running request its pages of the recent window.
So free pages, and the number of requests that SGLang may run, tell how much is left of each.

SGLang admits by expected output, in tokens. SGLang does not count the slots for drafts behind the
verified tokens of a running request, nor that slots come in pages. After a quiet time it expects
little output. KVSpec admits a request only if it and every running request can still grow by
headroom_tokens, or by the rest of its output. So pages cannot run out until some request has
added more than headroom_tokens since the last admission. Retracted requests pass the same check.
If nothing runs, the first waiting request starts, so that every request starts in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Output tokens that each request can add before pages may run out. A larger value keeps more pages
# free. A smaller value retracts more requests, whose prompts are computed again.
HEADROOM_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PageNeed:
    """Size of a request. held_pages: pages that it has, cached prefix included. num_tokens: tokens
    with verified KV; of a request that has not started, tokens that it prefills or finds cached.
    remaining: tokens that it may still emit."""

    held_pages: int
    num_tokens: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission check. reserve_tokens: slots that SGLang keeps behind the verified tokens of a
    running request."""

    page_size: int
    reserve_tokens: int
    headroom_tokens: int = HEADROOM_TOKENS

    def missing(self, need: PageNeed) -> int:
        """Return the pages that a request may still ask for before it has added its headroom."""
        added = min(max(need.remaining, 0), self.headroom_tokens)
        num_slots = need.num_tokens + added + self.reserve_tokens
        return max(-(-num_slots // self.page_size) - need.held_pages, 0)

    def has_room(self, request: PageNeed, others: Iterable[PageNeed], free_pages: int) -> bool:
        """Return True if `request` may start. others: requests that run or start with it.
        free_pages: free pages, and cached pages that no request uses."""
        others = tuple(others)
        if not others:
            return True
        return self.missing(request) + sum(map(self.missing, others)) <= free_pages
