"""Requests that need a page which is not in the residual store as it was written."""

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
    """Fails requests that would read a corrupt page, where the residual store is checked."""

    def __init__(self, corrupt: CorruptPages | None, ranks: Ranks, counters: SpecCounters) -> None:
        """corrupt: of the KV cache, None where its store is not checked."""
        self._corrupt, self._ranks, self._counters = corrupt, ranks, counters

    def mark(self, pages: torch.Tensor) -> None:
        """Let no request read pages that a failing request computes from corrupt ones."""
        if self._corrupt is not None:
            self._corrupt.mark(pages.tolist())

    def fails(self, req: Any, pages: torch.Tensor) -> bool:
        """Fail a request that is about to read residuals of these pages which are corrupt. Return
        whether it does. A request that prefills fails with its last chunk, since SGLang would lose
        the pages of another. Raises CorruptResidual where other ranks would go on serving it."""
        corrupt = self._corrupt.find(pages.tolist()) if self._corrupt is not None else []
        if not corrupt:
            return False
        message = (
            f"page {corrupt[0]} is not in the residual store as it was written: the request cannot "
            "be answered right. Where others fail alike, flush the cache, whose prefixes it may be "
            "among"
        )
        if self._ranks.size > 1:
            raise CorruptResidual(message)
        if req.inflight_middle_chunks <= 0:
            logger.error("%s (request %s)", message, req.rid)
            fail(req, message)
            self._counters.corrupt += 1
        return True

    def drop(self, batch: RoundBatch, rows: dict[int, Row]) -> None:
        """Take the rows of verifications that cannot read what they need out of `rows`, and fail
        their requests."""
        if self._corrupt is None:
            return
        for i, row in list(rows.items()):
            if row.kind is RowKind.VERIFY and self.fails(batch.handles[i], row.pages):
                del rows[i]
