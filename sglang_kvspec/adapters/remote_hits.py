"""Tokens of prompts that came from a prefix server: SGLang counts them as storage's."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

_tokens: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def note(req: Any, num_tokens: int) -> None:
    """Of a request whose prefix was loaded. What comes of it after a retraction was cached by it
    or by others since, and SGLang counts it no more."""
    if not req.retracted_stain:
        _tokens[req] = num_tokens


def tokens_of(req: Any) -> int:
    """Of those that SGLang counts in req.cached_tokens_storage."""
    return min(_tokens.get(req, 0), int(req.cached_tokens_storage))
