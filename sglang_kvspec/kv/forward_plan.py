"""Rows of one ragged forward. Plain data, decided before the forward."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class RowKind(Enum):
    """Kind of a row: DRAFT rows read anchors, all other rows read the target precision. A REPEAT
    row runs tokens for a scorer's sake: their KV is not stored. A GPU runs such rows at the target
    `exact` only."""

    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one request: positions start .. start + length - 1.

    pages: page ids [ceil((start + length) / page_size)] int64 of the request from position 0 on.
    direct: indices into pages, contiguous, PREFILL only: pages that the row writes whole and that
    are encoded at once, without the recent window.
    seen: what a DRAFT row reads of its full past pages; None for all. Indices int64 into pages,
    ascending: [num_seen], or [num_layers, num_kv_heads, num_seen] by layer and KV head, where on a
    GPU shorter lists end in the number of full past pages. On a CPU also a mask, bool [num_layers,
    num_kv_heads, tokens of these pages].
    proposed: the last tokens of a DRAFT row, which may or may not become drafts.
    """

    kind: RowKind
    start: int
    length: int
    pages: torch.Tensor
    direct: range = range(0)
    seen: torch.Tensor | None = None
    proposed: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def mask(self) -> torch.Tensor | None:
        """Return `seen` where it is a mask."""
        is_mask = self.seen is not None and self.seen.dtype is torch.bool
        return self.seen if is_mask else None

    def written_pages(self, page_size: int) -> range:
        """Return the indices into `pages` of the pages that this row writes to."""
        return range(0) if self.kind is RowKind.REPEAT else self.held_pages(page_size)

    def held_pages(self, page_size: int) -> range:
        """Return the indices of the request's pages, there or not, in which this row's tokens have
        their places."""
        return range(self.start // page_size, -(-self.end // page_size))

    def split_written(self, page_size: int) -> tuple[list[int], list[int]]:
        """Return the ids of the pages that this row writes to: first the pages in the window, then
        the pages that are encoded directly."""
        written = self.written_pages(page_size)
        ids = self.pages[written.start : written.stop].tolist()
        window = [page for i, page in zip(written, ids, strict=True) if i not in self.direct]
        return window, self.pages[self.direct.start : self.direct.stop].tolist()

    def past_pages(self, page_size: int) -> torch.Tensor:
        """Return the ids of the full pages that this row reads, before the pages that it writes.
        [num_past], or the shape of `seen` if that differs by layer and KV head. With a mask: all
        full pages."""
        past = self.pages[: self.start // page_size]
        return past if self.seen is None or self.mask is not None else past[self.seen]


def prefill_row(
    start: int, length: int, pages: torch.Tensor, *, page_size: int, recent_pages: int
) -> Row:
    """Return a PREFILL row that keeps its newest recent_pages full pages and its partial page in
    the window. The other pages that the row fills are encoded directly."""
    first_whole = -(-start // page_size)
    first_recent = max(first_whole, (start + length) // page_size - recent_pages)
    return Row(RowKind.PREFILL, start, length, pages, range(first_whole, first_recent))


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)
