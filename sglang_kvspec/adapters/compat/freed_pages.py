"""Where SGLang's paged allocator frees pages: in `free` until 0.5.16, since 0.5.17 in
`_release_page_ids`."""

from __future__ import annotations

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

__all__ = ["frees_by_page"]


def _has_method_of_pages() -> bool:
    return hasattr(PagedTokenToKVPoolAllocator, "_release_page_ids")


if _has_method_of_pages():

    def frees_by_page() -> bool:
        """Return True if every free of single pages ends in `_release_page_ids`."""
        return True

else:

    def frees_by_page() -> bool:
        """Return True if every free of single pages ends in `_release_page_ids`."""
        return False
