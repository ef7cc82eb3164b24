"""Seconds that a stream waits for its next tokens, as the worker expects."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

_seconds: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def note(req: Any, seconds: float) -> None:
    """Remember in how many seconds a request is expected to emit its next tokens."""
    _seconds[req] = seconds


def of(req: Any) -> float:
    """Return the seconds noted last, 0 for none."""
    return _seconds.get(req, 0.0)
