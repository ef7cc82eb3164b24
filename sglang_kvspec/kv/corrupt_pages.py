"""Pages whose residual changed in the store after it was written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sglang_kvspec.kv.checksums import Checksums
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_table import ResidualState, ResidualTable

_IN_STORE = (ResidualState.STORED, ResidualState.FETCHING)


class CorruptPages:
    """Checksums of the residual store, and the corrupt pages, which must not be read.

    A page stays corrupt until it is freed. Pages in the residual cache are taken to be intact.
    """

    def __init__(self, store: RecordPool, table: ResidualTable) -> None:
        self._store, self._table = store, table
        self._checksums = Checksums(store.num_layers)
        self._corrupt: set[int] = set()

    def note(self, layer: int, pages: Sequence[int], records: torch.Tensor) -> None:
        """Remember records [N, num_kv_heads, record_bytes] of a layer as they are written."""
        self._checksums.note(layer, pages, records)

    def find(self, pages: Iterable[int]) -> list[int]:
        """Return the corrupt pages among these: they changed in the store, or were computed from
        such pages. Zeroes the records of a page when it is first found."""
        pages = list(dict.fromkeys(pages))
        read = [p for p in pages if self._table.state(p) in _IN_STORE and p not in self._corrupt]
        rows, wrong = torch.tensor(read, dtype=torch.int64), set[int]()
        for layer in range(self._store.num_layers):
            wrong.update(self._checksums.wrong(layer, read, self._store.read(layer, rows)))
        for page in wrong:
            self._zero(page)
        self._corrupt |= wrong
        return [page for page in pages if page in self._corrupt]

    def mark(self, pages: Iterable[int]) -> None:
        """Add pages that are computed from corrupt ones."""
        self._corrupt.update(pages)

    def release(self, page: int) -> None:
        """Forget a page that was freed."""
        self._corrupt.discard(page)

    def _zero(self, page: int) -> None:
        # A forward of other requests may still read the page for a request that fails. Zeros keep
        # NaN out of that forward.
        for layer in range(self._store.num_layers):
            self._store.layer(layer)[page] = 0
