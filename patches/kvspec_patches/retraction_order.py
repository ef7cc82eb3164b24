"""ScheduleBatch._get_decode_retraction_order: retracts requests with far residuals first.

Until 0.5.18 the method takes server_args. Until 0.5.16 it also takes allow_policy_sort, which keeps
speculative requests in the order of the batch. KVSpec needs no such order: its draft input takes
any requests out of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def hook(original: Callable[..., list[int]], reqs: Any, *args: Any, **kwargs: Any) -> list[int]:
    from sglang_kvspec.adapters.scheduling import retraction_order

    return retraction_order(partial(original, reqs, *args, **kwargs), reqs)
