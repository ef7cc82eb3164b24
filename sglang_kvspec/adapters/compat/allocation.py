"""Launchers that hand out KV slots: SGLang compiles them late, KVSpec at the start."""

from __future__ import annotations

from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func, get_last_loc

__all__ = ["assign_req_to_token_pool_func", "get_last_loc"]
