"""Groups of frees of SGLang's allocator: until 0.5.18 a flag says whether one is open, since 0.5.19
the list of what it holds."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

__all__ = ["holds_frees"]


def _has_flag() -> bool:
    return "is_not_in_free_group" in PagedTokenToKVPoolAllocator.free.__code__.co_names


if _has_flag():

    def holds_frees(allocator: Any) -> bool:
        """Return True between free_group_begin() and free_group_end()."""
        return not allocator.is_not_in_free_group

else:

    def holds_frees(allocator: Any) -> bool:
        """Return True between free_group_begin() and free_group_end()."""
        return allocator.free_group is not None
