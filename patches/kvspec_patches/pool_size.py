"""Engine._launch_subprocesses: tells the HTTP process how many tokens the KV pool holds.

SGLang 0.5.17 passes on the length of the longest prompt only.
"""

from __future__ import annotations

from typing import Any


def hook(result: tuple[Any, ...], cls: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_kvspec.adapters.request_gate import note_pool

    tokenizer_manager, scheduler_infos = result[0], result[3].scheduler_infos
    if tokenizer_manager is not None:
        note_pool(tokenizer_manager, scheduler_infos[0]["max_total_num_tokens"])
