"""Which anchor pages a draft reads."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.request_state import RequestState


class DraftView(Protocol):
    """Chooses pages. Registered in the entry-point group `sglang_kvspec.draft_views` as a class
    whose constructor takes the server's KVSpecConfig.

    A view may choose anything: drafts are verified against all pages. It must choose alike on every
    rank, so by what the state holds and nothing that a rank has measured.
    """

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        """Return indices [num_selected] int64, ascending and on the CPU, of the request's first
        num_pages pages, all of them full, that its next drafts read; None for all. A GPU reads
        pages of the recent window whatever is selected."""


class AllPages:
    """Every page, in which drafts agree best with the target."""

    def __init__(self, config: object) -> None:
        pass

    def select(self, state: RequestState, num_pages: int) -> None:
        """Select all pages."""


def draft_forward_row(
    state: RequestState, position: int, pages: torch.Tensor, page_size: int, view: DraftView | None
) -> Row:
    """Return the DRAFT row of one token at `position`. view: None for all pages."""
    seen = None if view is None else view.select(state, position // page_size)
    return Row(RowKind.DRAFT, position, 1, pages, seen=seen)
