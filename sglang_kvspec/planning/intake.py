"""Whether a waiting request may start: only where nobody has to be retracted for it soon.

A page of the pool is a budget of three things at once. The capacity plan gives every page an
anchor and a row of the residual store, and every running request its pages of the recent window;
so free pages, and the number of requests SGLang may run, say what is left of each.

SGLang admits by the output it expects, in tokens. Of a running request it does not know the slots
behind its verified tokens, which drafts need, nor that they come in pages, and after a quiet time
it expects little output. Here every running request has room for its next headroom_tokens, or for
its last ones, before another may start. So once a request has started, no pages are lacking until
some request has added more than headroom_tokens since; and as long as nobody has, retracted
requests wait, too. Where nothing runs the first one that waits starts, so that each does in the
end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Of output that each request can add before pages may be lacking. More keeps more pages free, less
# has more requests retracted, whose prompts are computed again.
HEADROOM_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PageNeed:
    """held_pages: those a request has, cached prefix included. num_tokens: those with verified KV,
    or, of one that has not started, those it prefills or finds cached. remaining: tokens it may
    still emit."""

    held_pages: int
    num_tokens: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Intake:
    """reserve_tokens: slots that SGLang keeps behind the verified tokens of a running request."""

    page_size: int
    reserve_tokens: int
    headroom_tokens: int = HEADROOM_TOKENS

    def lacking(self, need: PageNeed) -> int:
        """Pages that a request may ask for before it has added its headroom."""
        added = min(max(need.remaining, 0), self.headroom_tokens)
        num_slots = need.num_tokens + added + self.reserve_tokens
        return max(-(-num_slots // self.page_size) - need.held_pages, 0)

    def has_room(self, request: PageNeed, others: Iterable[PageNeed], free_pages: int) -> bool:
        """Whether `request` may start beside others, which run or start with it. free_pages: free
        ones, and cached ones that nobody uses."""
        others = tuple(others)
        if not others:
            return True
        return self.lacking(request) + sum(map(self.lacking, others)) <= free_pages
