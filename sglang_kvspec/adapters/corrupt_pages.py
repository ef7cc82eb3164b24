"""Guard against pages that changed in the residual store after they were written."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_kvspec.adapters.requests import fail
from sglang_kvspec.core.errors import CorruptResidual
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.kv.corrupt_pages import CorruptPages
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.ranks import Ranks

logger = logging.getLogger(__name__)


class CorruptPageGuard:
    """The engine's PageGuard: fails requests that would read a corrupt page. Does nothing if the
    residual store is not checked."""

    def __init__(self, corrupt: CorruptPages | None, ranks: Ranks, counters: SpecCounters) -> None:
        """corrupt: the KV cache's corrupt pages; None if its store is not checked."""
        self._corrupt, self._ranks, self._counters = corrupt, ranks, counters

    def mark(self, pages: torch.Tensor) -> None:
        """Mark pages that a failing request computes from corrupt ones: they must not be read."""
        if self._corrupt is not None:
            self._corrupt.mark(pages.tolist())

    def fails(self, req: Any, pages: torch.Tensor) -> bool:
        """Fail a request that is about to read residuals of these pages, if one of them is corrupt.
        Return True if one is. A prefill fails with its last chunk only: SGLang would lose the pages
        of another chunk. Raises CorruptResidual if other ranks would continue the request."""
        corrupt = self._corrupt.find(pages.tolist()) if self._corrupt is not None else []
        if not corrupt:
            return False
        message = (
            f"page {corrupt[0]} of the residual store is corrupt: the request cannot be answered "
            "correctly. If other requests fail in the same way, flush the cache: a cached prefix "
            "may contain the page"
        )
        if self._ranks.size > 1:
            raise CorruptResidual(message)
        if req.inflight_middle_chunks <= 0:
            logger.error("%s (request %s)", message, req.rid)
            fail(req, message)
            self._counters.corrupt += 1
        return True

    def drop(self, batch: RoundBatch, rows: dict[int, Row]) -> None:
        """Remove verifications that would read a corrupt page from `rows`. Fail their requests."""
        if self._corrupt is None:
            return
        for i, row in list(rows.items()):
            if row.kind is RowKind.VERIFY and self.fails(batch.handles[i], row.pages):
                del rows[i]
