"""Counts of the drafts of SGLang's requests. They outlive a retraction, and states do not."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sglang_kvspec.runtime.draft_counts import DraftCounts

_counts: WeakKeyDictionary[Any, DraftCounts] = WeakKeyDictionary()


def counts_of(req: Any) -> DraftCounts:
    """Return the counts of a request, the same object at each call."""
    return _counts.setdefault(req, DraftCounts())
