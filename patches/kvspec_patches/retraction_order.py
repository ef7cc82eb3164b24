"""ScheduleBatch._get_decode_retraction_order: requests whose residuals are far go before others.

SGLang 0.5.17. Remove when a retraction order can be registered and is given the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order"
KIND = "around"
SCOPE = "kvspec"


def hook(original: Callable[..., list[int]], reqs: Any, server_args: Any) -> list[int]:
    from sglang_kvspec.adapters.scheduling import retraction_order

    return retraction_order(original, reqs, server_args)
