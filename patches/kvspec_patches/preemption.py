"""PrefillAdder.preempt_to_schedule: counts requests retracted for a request of higher priority."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
    from sglang_kvspec.adapters.scheduling import preempt

    return preempt(original, self, args, kwargs)
