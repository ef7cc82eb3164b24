"""KVCacheConfigurator._build_mha_kv_pool: builds KVSpec's pool from the sizing plan.

Until SGLang 0.5.21 it builds pools of GPUs only, since 0.5.22 those of CPUs, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], self: Any, *, max_total_num_tokens: int, **rest: Any) -> Any:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.pool import build_pool

    config = config_of(self.server_args)
    if config is None:
        return original(self, max_total_num_tokens=max_total_num_tokens, **rest)
    return build_pool(self, config, max_total_num_tokens)
