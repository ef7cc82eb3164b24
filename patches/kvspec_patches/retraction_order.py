"""ScheduleBatch._get_decode_retraction_order: retracts requests with far residuals first. Until
0.5.18 the method takes server_args.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., list[int]], reqs: Any, *args: Any) -> list[int]:
    from sglang_kvspec.adapters.scheduling import retraction_order

    return retraction_order(original, reqs, args)
