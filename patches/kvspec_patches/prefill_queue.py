"""Scheduler.get_new_batch_prefill: requests wait for pages of a prefix server, or start early on
their anchors. Waiting requests are counted. All ranks load the same pages from their tiers.

SGLang 0.5.17 does so for its own hierarchical cache only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_kvspec.adapters.prefix_queue import new_batch
    from sglang_kvspec.adapters.scheduling import pressure_of

    result = new_batch(original, self, args, kwargs)
    pressure_of(self.token_to_kv_pool_allocator).note_queue(len(self.waiting_queue))
    return result
