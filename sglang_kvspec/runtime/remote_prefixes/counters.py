"""Counters of lookups at a prefix server, and of publishing to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RemoteCounters:
    """Totals since the server started. lookups: lookups of prompts; hits: lookups of which the
    store had a page; expired: lookups whose request went on without waiting for the rest. unasked:
    prompts with missing pages that were not looked up: no link, no room, or an open circuit
    breaker. early: requests that started on anchors; returned: early requests whose residuals did
    not arrive; drafts_on_anchors: tokens that early requests drafted before their residuals
    arrived. pages_published: pages put into the store; pages_unkept: pages sent but not stored;
    pages_dropped: pages not sent, because more waited than the bandwidth allows."""

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
