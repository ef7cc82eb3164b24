"""release_kv_cache: pages that stay as a cached prefix leave the recent window.

SGLang 0.5.17 tells a worker of requests that end while they decode, but not of requests that end
with their prefill.
"""

from __future__ import annotations

from typing import Any


def hook(req: Any, tree_cache: Any, is_insert: bool = True) -> None:
    from sglang_kvspec.adapters.compat.request_kv import kv_of

    if is_insert and kv_of(req).req_pool_idx is not None:
        pool = tree_cache.token_to_kv_pool_allocator.get_kvcache()
        pool.retire(req, tree_cache.req_to_token_pool)
