"""PagedTokenToKVPoolAllocator.clear: tells KVSpec's pool that every page is free."""

from __future__ import annotations

from typing import Any


def hook(result: None, self: Any) -> None:
    on_all_pages_freed = getattr(self._kvcache, "on_all_pages_freed", None)
    if on_all_pages_freed is not None:
        on_all_pages_freed()
