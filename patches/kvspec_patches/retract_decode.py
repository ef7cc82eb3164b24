"""ScheduleBatch.retract_decode: counts retractions by reason, and tells the order whose they are.

SGLang 0.5.17. Remove when a retraction order can be registered and is given the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode"
KIND = "around"
SCOPE = "kvspec"


def hook(original: Callable[..., Any], self: Any, server_args: Any) -> Any:
    from sglang_kvspec.adapters.scheduling import retract

    return retract(original, self, server_args)
