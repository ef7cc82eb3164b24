"""What a server and its prefix server did for each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RemoteCounters:
    """Since the server started. lookups: prompts that were asked for; hits: of them, those of which
    the store had a page; expired: those that went on without waiting for the rest of what was
    asked; unasked: prompts with pages to ask for while there was no link, no room or no hope;
    early: requests that started on anchors; returned: of them, those whose residuals did not come;
    drafts_on_anchors: tokens drafted by them while residuals were on their way.
    pages_published are in the store; pages_unkept were sent and are not; pages_dropped were not
    sent, since more waited than the bandwidth allows."""

    lookups: int = 0
    hits: int = 0
    expired: int = 0
    unasked: int = 0
    early: int = 0
    returned: int = 0
    drafts_on_anchors: int = 0
    pages_found: int = 0
    pages_fetched: int = 0
    pages_published: int = 0
    pages_unkept: int = 0
    pages_dropped: int = 0
