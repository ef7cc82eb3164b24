"""SGLang's paged allocator, which has no torch path and does not report freed pages."""

from __future__ import annotations

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive
from sglang.srt.utils import get_num_new_pages

__all__ = ["PagedTokenToKVPoolAllocator", "alloc_extend_naive", "get_num_new_pages"]
