"""Operators of drafts: torch's own, also with deterministic inference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_kvspec.adapters.compat import batch_invariance


@contextmanager
def draft_operators() -> Iterator[None]:
    """Put torch's own operators in force for the whole process, in place of SGLang's
    batch-invariant ones, which take two to three times as long for the few rows of a draft step.

    Graphs that are captured in this context keep these operators. No target forward may run in it.
    """
    if not batch_invariance.is_batch_invariant_mode_enabled():
        yield
        return
    batch_invariance.disable_batch_invariant_mode()
    try:
        yield
    finally:
        batch_invariance.enable_batch_invariant_mode()
