"""Scheduler.get_new_batch_prefill: requests wait for prefixes on their way, or start on their
anchors, and are counted; ranks agree on what their tiers have.

SGLang 0.5.17 waits and agrees so for its own hierarchical cache only.
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
