"""Queries of the newest tokens of each request, kept from forwards at the target precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_kvspec.kv.forward_plan import Row, RowKind

# Scaled queries by layer: [num_queries, num_heads, head_dim] each.
LayerQueries = list[torch.Tensor]


class TargetQueries:
    """Queries of the rows of the newest forward. A row keeps as many as can be the last ones of
    verified tokens: all of a VERIFY row, and the last `most` of a PREFILL row."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._rows: Sequence[Row] = ()
        self._kept: list[LayerQueries] = []

    def begin(self, rows: Sequence[Row]) -> None:
        """Forget the last forward. The next one runs over `rows`."""
        self._rows, self._kept = rows, [[] for _ in rows]

    def keep(self, index: int, q: torch.Tensor, scale: float) -> None:
        """Keep queries of the next layer of row `index`. q: [length, num_heads, head_dim]."""
        kind = self._rows[index].kind
        if kind is RowKind.VERIFY:
            self._kept[index].append(q * scale)
        elif kind is RowKind.PREFILL:
            self._kept[index].append(q[-self.most :] * scale)

    def before(self, index: int, end: int) -> LayerQueries:
        """Return the last `most` queries of row `index`, by layer, of positions before `end`, as
        far as the row has them."""
        behind = self._rows[index].end - end
        return [q[: len(q) - behind][-self.most :] for q in self._kept[index]]
