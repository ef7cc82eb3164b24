"""create_memory_pool_configurator: sizes the pool from anchor bytes, not from the KV dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], kvc: Any) -> Any:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.pool_sizing import KVSpecPoolConfigurator

    config = config_of(kvc.server_args)
    return original(kvc) if config is None else KVSpecPoolConfigurator(kvc, config)
