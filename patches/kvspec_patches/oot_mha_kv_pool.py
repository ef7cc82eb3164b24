"""KVCacheConfigurator._build_oot_mha_kv_pool: builds KVSpec's pool on a CPU from the sizing plan.

The class hook of a platform is given a token count only. KVSpec's pool also needs the window,
residual and host budgets, which are decided together with that count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], self: Any, *, max_total_num_tokens: int) -> Any:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.pool import build_pool

    config = config_of(self.server_args)
    if config is None:
        return original(self, max_total_num_tokens=max_total_num_tokens)
    return build_pool(self, config, max_total_num_tokens)
