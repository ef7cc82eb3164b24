"""SGLang's paged allocator in plain torch, and the one that tells the pool about freed pages."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.adapters.compat.allocator import (
    PagedTokenToKVPoolAllocator,
    alloc_extend_naive,
    get_num_new_pages,
)
from sglang_kvspec.adapters.compat.free_groups import holds_frees
from sglang_kvspec.adapters.compat.freed_pages import frees_by_page


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """Page allocation without Triton, for any page size including 1."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Return slots [extend_num_tokens] int64 for the new tokens of every request; None if too
        few pages are free."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        self._sort_if_short_of(num_new_pages)
        if num_new_pages > len(self.free_pages):
            return None
        out = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(
            prefix_lens, seq_lens, last_loc, self.free_pages, out, self.page_size, self.device
        )
        self.free_pages = self.free_pages[num_new_pages:]
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Return slots [batch_size] int64 of every request's next token; None if pages run out."""
        starts_page = (seq_lens_cpu - 1) % self.page_size == 0
        num_new_pages = int(starts_page.sum())
        self._sort_if_short_of(num_new_pages)
        if num_new_pages > len(self.free_pages):
            return None
        out = last_loc.to(torch.int64) + 1
        new_pages = self.free_pages[:num_new_pages].to(torch.int64)
        out[starts_page.to(out.device)] = new_pages * self.page_size
        self.free_pages = self.free_pages[num_new_pages:]
        return out

    def _sort_if_short_of(self, num_pages: int) -> None:
        if self.need_sort and num_pages > len(self.free_pages):
            self.merge_and_sort_free()


class _ReportedPages(TorchPagedAllocator):
    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        super()._release_page_ids(*page_ids)
        self._kvcache.on_pages_freed(torch.cat(page_ids).tolist())


class _ReportedFrees(TorchPagedAllocator):
    def free(self, free_index: torch.Tensor) -> None:
        super().free(free_index)
        self._kvcache.on_pages_freed(pages_freed(self, free_index))


def pages_freed(allocator: Any, free_index: torch.Tensor) -> list[int]:
    """Return the pages that a call of free() has freed: none within a group of frees, whose end
    calls it again. free_index: slots [num_slots] int64, in any order."""
    if holds_frees(allocator):
        return []
    pages: list[int] = torch.unique(free_index // allocator.page_size).tolist()
    return pages


class KVSpecAllocator(_ReportedPages if frees_by_page() else _ReportedFrees):  # type: ignore[misc]
    """Allocator that also reports every freed page, whichever part of SGLang frees it.

    All frees, deferred groups included, end in `_release_page_ids` or `clear`. On a SGLang without
    the first, they end in `free`.
    """

    def clear(self) -> None:
        super().clear()
        self._kvcache.on_all_pages_freed()
