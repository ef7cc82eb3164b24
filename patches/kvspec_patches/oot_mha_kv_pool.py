"""KVCacheConfigurator._build_oot_mha_kv_pool: builds our pool from the plan the sizing made.

The platform's class hook would get a token count only; ours needs the window, residual and host
budgets decided together with it.
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
