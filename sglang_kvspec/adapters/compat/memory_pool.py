"""KV pools: SGLang has no interface for pools of plugins."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool

__all__ = ["KVCache", "MHATokenToKVPool"]
