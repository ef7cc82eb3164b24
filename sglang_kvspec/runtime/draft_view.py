"""Draft views: the anchor pages that a draft reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast, runtime_checkable

import torch

from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.planning.draft_budget import SINK_PAGES
from sglang_kvspec.runtime.head_lists import HeadLists
from sglang_kvspec.runtime.request_state import RequestState


@dataclass(frozen=True, slots=True)
class ViewShape:
    """Sizes that a view is made for.

    num_layers, num_kv_heads: of this rank. first_kv_head: number of the rank's first KV head among
    all of the model. page_size: tokens of a page.
    """

    num_layers: int
    num_kv_heads: int
    first_kv_head: int
    page_size: int


class DraftView(Protocol):
    """Selection of the pages that drafts read. Registered in the entry-point group
    `sglang_kvspec.draft_views` as a class whose constructor takes the server's KVSpecConfig and the
    rank's ViewShape.

    per_head: whether layers and KV heads may read different pages. On a GPU, such a view has a list
    of pages for each layer and KV head. num_queries: number of a request's last verified queries
    whose attention mass the view, a MassView, chooses by; 0 for a view that chooses without. Both
    are read once, before anything is captured.

    A view may select any pages: drafts are verified against all pages. The selection for a layer
    and KV head depends on what the state holds, never on what a rank has measured, so that ranks
    agree on the number of pages.
    """

    per_head: ClassVar[bool]
    num_queries: ClassVar[int]

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        """Return which of the request's first num_pages pages, all of them full, its next drafts
        read; None for all. Changes neither the state nor a tensor that it returned before.

        Indices are int64 on the CPU, 0 .. num_pages - 1, ascending along the last dimension, each
        once; nothing checks them. Their shape is [num_selected], or where per_head [num_layers,
        num_kv_heads, num_selected] for lists of one length. A GPU reads pages of the recent window
        whatever is selected.
        """


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Numbers of pages that a MassView reads in addition to the first SINK_PAGES: the `best` pages
    with the largest attention mass, and all pages from index `newest` on."""

    best: int
    newest: int

    def total(self, num_pages: int) -> int:
        """Return how many of num_pages pages are read."""
        return SINK_PAGES + self.best + num_pages - self.newest


class MassView(DraftView, Protocol):
    """View of the pages with the largest attention mass, for each layer and KV head."""

    def counts(self, state: RequestState, num_pages: int) -> PageCounts | None:
        """Return how many of the request's first num_pages pages its next drafts read; None for
        all. Pages from index `newest` on include all that have no mass yet."""


@runtime_checkable
class TokenView(DraftView, Protocol):
    """View that may read another number of tokens with each head. On a CPU, select() returns a
    mask, and on a GPU lists of different lengths, see Row.seen."""

    def num_tokens(self, state: RequestState, num_pages: int) -> float:
        """Return how many tokens of the request's first num_pages pages its next draft reads, the
        mean of this rank's layers and KV heads."""


class AllPages:
    """View of every page, with which drafts agree best with the target."""

    per_head: ClassVar[bool] = False
    num_queries: ClassVar[int] = 0

    def __init__(self, config: object, shape: ViewShape) -> None:
        pass

    def select(self, state: RequestState, num_pages: int) -> None:
        """Select all pages."""


@dataclass(frozen=True, slots=True)
class DraftReads:
    """Numbers of tokens that drafts read. view: None for all pages."""

    view: DraftView | None = None
    page_size: int = 1

    def tokens(self, state: RequestState) -> int:
        """Return how many tokens of its context the request's next draft reads, with each head."""
        num_tokens = state.committed_len
        num_pages = num_tokens // self.page_size
        if self.view is None:
            return num_tokens
        if isinstance(self.view, TokenView):
            in_pages = self.view.num_tokens(state, num_pages)
            return round(num_tokens - num_pages * self.page_size + in_pages)
        if self.view.num_queries:
            counts = cast("MassView", self.view).counts(state, num_pages)
            num_seen = num_pages if counts is None else counts.total(num_pages)
        else:
            seen = self.view.select(state, num_pages)
            num_seen = num_pages if seen is None else seen.shape[-1]
        return num_tokens - (num_pages - num_seen) * self.page_size

    def mean_tokens(self, states: Sequence[RequestState]) -> float:
        """Return the mean of tokens() of requests."""
        return sum([self.tokens(state) for state in states]) / len(states)


def head_lists(
    view: DraftView | None, geometry: KVGeometry, device: torch.device
) -> HeadLists | None:
    """Make the lists of pages of the layers and KV heads; None if all share one."""
    if view is None or not view.per_head:
        return None
    return HeadLists(geometry.num_layers, geometry.num_kv_heads, device)


def draft_forward_row(
    state: RequestState,
    position: int,
    pages: torch.Tensor,
    page_size: int,
    view: DraftView | None,
    proposed: Sequence[int] = (),
) -> Row:
    """Return the DRAFT row of one token at `position`, and of proposed tokens behind it. view: None
    for all pages. With a view, all tokens must lie in one page, by which the view selects."""
    seen = None if view is None else view.select(state, position // page_size)
    length = 1 + len(proposed)
    return Row(RowKind.DRAFT, position, length, pages, seen=seen, proposed=tuple(proposed))
