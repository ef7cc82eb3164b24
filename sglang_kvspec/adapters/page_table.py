"""Page ids of requests, from SGLang's slot table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvspec.adapters.compat.request_kv import kv_of


class PageTable:
    """SGLang's req_to_token table, read in pages."""

    def __init__(self, req_to_token_pool: Any, page_size: int) -> None:
        self._pool, self._page_size = req_to_token_pool, page_size

    def of_request(self, req: Any, num_tokens: int) -> torch.Tensor:
        """Return the page ids of a request's first num_tokens tokens: [ceil(num_tokens /
        page_size)] int64 on the CPU."""
        size = self._page_size
        slots = self._pool.req_to_token[kv_of(req).req_pool_idx, :num_tokens:size]
        return slots.cpu().to(torch.int64) // size

    def of_batch(self, pool_indices: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the page ids of every request's first counts[i] tokens, in one transfer.

        pool_indices: [num_requests] int64, rows of the table.
        """
        size = self._page_size
        slots = self._pool.req_to_token[pool_indices, : max(counts) : size]
        pages = slots.cpu().to(torch.int64) // size
        return [row[: -(-count // size)] for row, count in zip(pages, counts, strict=True)]
