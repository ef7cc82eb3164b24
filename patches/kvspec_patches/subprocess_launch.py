"""Engine._launch_subprocesses: has child processes serve what the ServerArgs ask for, and tells the
HTTP process how many tokens the KV pool holds.

ServerArgs may have been built without KVSpec after those of an engine with it. SGLang 0.5.17 passes
on the length of the longest prompt, and not the size of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(
    original: Callable[..., tuple[Any, ...]], cls: type, server_args: Any, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    from sglang_kvspec.adapters.activation import follow
    from sglang_kvspec.adapters.request_gate import note_pool

    follow(server_args)
    result = original(cls, server_args, *args, **kwargs)
    tokenizer_manager, scheduler_infos = result[0], result[3].scheduler_infos
    if tokenizer_manager is not None:
        note_pool(tokenizer_manager, scheduler_infos[0]["max_total_num_tokens"])
    return result
