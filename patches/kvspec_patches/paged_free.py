"""PagedTokenToKVPoolAllocator.free: tells KVSpec's pool which pages became free.

Until 0.5.16 all frees of single pages end here. A group of frees calls it once it ends.
"""

from __future__ import annotations

from typing import Any

import torch


def hook(result: None, self: Any, free_index: torch.Tensor) -> None:
    from sglang_kvspec.adapters.allocator import pages_freed

    on_pages_freed = getattr(self._kvcache, "on_pages_freed", None)
    if on_pages_freed is not None:
        on_pages_freed(pages_freed(self, free_index))
