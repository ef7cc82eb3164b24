"""Queries of the newest tokens of each request, kept by a GPU from forwards at the target
precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.kv.transfers import to_device


class DeviceQueries:
    """Queries of the rows of the newest forward, in memory whose addresses never change. So CUDA
    graphs may write and read them.

    by_layer: [num_layers, max_tokens, num_heads, head_dim], unscaled. A row keeps as many queries
    as can be the last ones of verified tokens.
    """

    def __init__(
        self,
        most: int,
        max_rows: int,
        max_draft_len: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """most: queries of a request that before() may return. max_rows: of a forward. shape:
        (num_layers, num_heads, head_dim)."""
        self.most, self._most_kept = most, max(most, max_draft_len + 1)
        num_layers, *head = shape
        self.max_tokens = max_rows * self._most_kept
        sizes = (num_layers, self.max_tokens, *head)
        self.by_layer = torch.zeros(sizes, dtype=dtype, device=device)
        # (first kept query, end of them, position behind the last one) of each row.
        self._spans: list[tuple[int, int, int]] = []
        self._tokens: torch.Tensor | None = None

    def begin(self, rows: Sequence[Row]) -> None:
        """Forget the last forward. The next one runs over `rows`, and calls keep()."""
        tokens: list[int] = []
        self._spans, begin = [], 0
        for row in rows:
            count = {RowKind.VERIFY: self._most_kept, RowKind.PREFILL: self.most}.get(row.kind, 0)
            begin += row.length
            first = len(tokens)
            tokens += range(begin - min(count, row.length), begin)
            self._spans.append((first, len(tokens), row.end))
        assert len(tokens) <= self.max_tokens, "the forward has more rows than were allocated"
        device = self.by_layer.device
        self._tokens = to_device(device, torch.tensor(tokens, dtype=torch.int64))

    def keep(self, layer: int, q: torch.Tensor) -> None:
        """Keep queries of a layer of the forward that was begun. q: [num_tokens, num_heads,
        head_dim]."""
        assert self._tokens is not None, "no forward was begun"
        kept = self.by_layer[layer, : len(self._tokens)]
        torch.index_select(q, 0, self._tokens, out=kept)

    def begin_captured(self, rows: Sequence[Row]) -> None:
        """Forget the last forward. The next one is a replay over VERIFY rows, which keeps all their
        queries by keep_all()."""
        self._spans, begin = [], 0
        for row in rows:
            self._spans.append((begin, begin + row.length, row.end))
            begin += row.length

    def keep_all(self, layer: int, q: torch.Tensor) -> None:
        """Keep the queries of all tokens, in a graph. More than max_tokens are never in use."""
        count = min(len(q), self.max_tokens)
        self.by_layer[layer, :count].copy_(q[:count])

    def before(self, index: int, end: int) -> tuple[int, int]:
        """Return the first kept query, and the number, of the last queries of row `index` for
        positions before `end`: `most` of them, as far as the row has them."""
        first, last, row_end = self._spans[index]
        last -= row_end - end
        count = max(min(self.most, last - first), 0)
        return last - count, count
