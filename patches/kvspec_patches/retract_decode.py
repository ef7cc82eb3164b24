"""ScheduleBatch.retract_decode: counts retractions by reason, and gives the batch to the retraction
order. Until 0.5.18 the method takes server_args.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    from sglang_kvspec.adapters.scheduling import retract

    return retract(original, self, args)
