"""Requests that need a page which is not in the residual store as it was written."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_kvspec.adapters.requests import fail
from sglang_kvspec.core.errors import SpoiledResidual
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.runtime.forward_plan import Row, RowKind
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.ranks import Ranks

logger = logging.getLogger(__name__)


class CorruptPageGuard:
    """Finds such pages where `residuals`, those of a KV cache, are checked."""

    def __init__(self, residuals: Any, ranks: Ranks, counters: SpecCounters) -> None:
        self._residuals, self._ranks, self._counters = residuals, ranks, counters

    def fails(self, req: Any, pages: torch.Tensor) -> bool:
        """Fail a request that is about to read residuals of these pages which are corrupt. Return
        whether it does. A request that prefills fails with its last chunk, since SGLang would lose
        the pages of another. Raises SpoiledResidual where other ranks would go on serving it."""
        residuals = self._residuals
        spoiled = residuals.find_spoiled(pages.tolist()) if residuals.is_checked else []
        if not spoiled:
            return False
        message = (
            f"page {spoiled[0]} is not in the residual store as it was written: the request cannot "
            "be answered right. Where others fail alike, flush the cache, whose prefixes it may be "
            "among"
        )
        if self._ranks.size > 1:
            raise SpoiledResidual(message)
        if req.inflight_middle_chunks <= 0:
            logger.error("%s (request %s)", message, req.rid)
            fail(req, message)
            self._counters.spoiled += 1
        return True

    def drop(self, batch: RoundBatch, rows: dict[int, Row]) -> None:
        """Take the rows of verifications that cannot read what they need out of `rows`, and fail
        their requests."""
        if not self._residuals.is_checked:
            return
        for i, row in list(rows.items()):
            if row.kind is RowKind.VERIFY and self.fails(batch.handles[i], row.pages):
                del rows[i]
