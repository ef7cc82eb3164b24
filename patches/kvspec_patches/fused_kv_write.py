"""enable_fused_set_kv_buffer: rotary kernels must not write KV themselves into a pool of records.

SGLang 0.5.17 only checks for CUDA and bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    from sglang_kvspec.adapters.pool import KVSpecPool

    if isinstance(get_token_to_kv_pool(), KVSpecPool):
        return False
    return original(*args, **kwargs)
