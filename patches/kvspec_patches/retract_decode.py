"""ScheduleBatch.retract_decode: counts retractions by reason, and tells the order the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], self: Any, server_args: Any) -> Any:
    from sglang_kvspec.adapters.scheduling import retract

    return retract(original, self, server_args)
