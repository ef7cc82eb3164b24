"""PagedTokenToKVPoolAllocator.clear: tells our pool that every page is free.

SGLang 0.5.17. Remove when pools are told about freed pages.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear"
KIND = "after"
SCOPE = "cuda_kvspec"


def hook(result: None, self: Any) -> None:
    on_all_pages_freed = getattr(self._kvcache, "on_all_pages_freed", None)
    if on_all_pages_freed is not None:
        on_all_pages_freed()
