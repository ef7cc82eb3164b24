"""PagedTokenToKVPoolAllocator._release_page_ids: tells KVSpec's pool which pages became free.

All frees of single pages, deferred groups included, end here.
"""

from __future__ import annotations

from typing import Any

import torch


def hook(result: None, self: Any, *page_ids: torch.Tensor) -> None:
    on_pages_freed = getattr(self._kvcache, "on_pages_freed", None)
    if on_pages_freed is not None:
        on_pages_freed(torch.cat(page_ids).tolist())
