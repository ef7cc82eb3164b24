"""Scheduler.get_new_batch_prefill: notes how many requests wait.

SGLang 0.5.17. Remove when SGLang says what its queue waits for.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
KIND = "after"
SCOPE = "kvspec"


def hook(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_kvspec.adapters.scheduling import pressure_of

    pressure_of(self.token_to_kv_pool_allocator).note_queue(len(self.waiting_queue))
