"""ScheduleBatch._get_decode_retraction_order: retracts requests with far residuals first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., list[int]], reqs: Any, server_args: Any) -> list[int]:
    from sglang_kvspec.adapters.scheduling import retraction_order

    return retraction_order(original, reqs, server_args)
