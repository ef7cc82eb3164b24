"""State and cache slot of every page's residual, and the protocol of both residual caches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from sglang_kvspec.kv.corrupt_pages import CorruptPages
from sglang_kvspec.kv.packed_pages import PackedPages
from sglang_kvspec.kv.page_slots import OwnSlots, PageSlots
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_table import ResidualState, ResidualTable
from sglang_kvspec.planning.capacity import CapacityPlan


class ResidualPages:
    """Page table of residuals, and slots of the residual cache.

    table: state of each page. slots: cache slot of each page that has one.
    """

    def __init__(self, plan: CapacityPlan, device: torch.device) -> None:
        """device: device of the slot table."""
        self.table = ResidualTable(plan.num_pages)
        self.slots = (
            OwnSlots(plan.num_pages, device)
            if plan.cache_pages >= plan.num_pages
            else PageSlots(plan.num_pages, plan.cache_pages, device)
        )

    def missing(self, pages: Iterable[int]) -> list[int]:
        """Return the pages whose residual is in the store only, in the given order."""
        return self.table.pages_in(pages, ResidualState.STORED)

    def finish(self, pages: Iterable[int]) -> None:
        """Make pages whose layers are all written RESIDENT, or STORED if they have no slot."""
        for page in pages:
            is_cached = page in self.slots
            self.table.advance(page, ResidualState.RESIDENT if is_cached else ResidualState.STORED)

    def check_readable(self, pages: Iterable[int]) -> list[ResidualState]:
        """Return the states of these pages. Raises AssertionError for a page that is ABSENT or
        IN_FLIGHT."""
        absent = {ResidualState.ABSENT, ResidualState.IN_FLIGHT}
        states = [self.table.state(page) for page in pages]
        assert absent.isdisjoint(states), "a page without a residual was read"
        return states

    def check_integrity(self) -> None:
        """Raise AssertionError when table and slots disagree."""
        self.slots.check_integrity()
        in_cache = {ResidualState.FETCHING, ResidualState.RESIDENT, ResidualState.IN_FLIGHT}
        for page in self.slots:
            state = self.table.state(page)
            assert state in in_cache, f"page {page} is {state.name} but has a cache slot"
        counts = self.table.counts()
        num_cached = counts["FETCHING"] + counts["RESIDENT"]
        assert num_cached <= len(self.slots), "a cached page has no cache slot"


class PackedRows(Protocol):
    """Pages of a store that holds residuals in the packed form."""

    @property
    def num_unfit(self) -> int:
        """Records of the stored pages that do not fit, whose V is stored besides."""

    def read_packed(self, pages: Sequence[int]) -> PackedPages:
        """Return read_pages() in the packed form."""

    def write_packed(self, pages: Sequence[int], packed: torch.Tensor, raw_v: torch.Tensor) -> None:
        """Store the packed residuals of distinct landing pages, see PackedPages."""


class Residuals(Protocol):
    """Residuals of one rank's pages.

    corrupt: finds pages that changed in the store; None if pages are not checked. bytes_fetched:
    bytes copied from the store into the cache. bytes_streamed: bytes read from the store for one
    read only.
    """

    table: ResidualTable
    cache_slots: PageSlots
    corrupt: CorruptPages | None
    bytes_fetched: int
    bytes_streamed: int

    @property
    def cache(self) -> RecordPool:
        """Records of the residual cache, by slot."""

    @property
    def hbm_nbytes(self) -> int:
        """Bytes of GPU memory."""

    def cache_layer(self, layer: int) -> torch.Tensor:
        """Return the cache's records of a layer: [cache_pages, num_kv_heads, record_bytes]
        uint8."""

    def begin(self, pages: Sequence[int]) -> None:
        """Make free pages IN_FLIGHT: their residuals are about to be encoded, layer by layer."""

    def begin_landing(self, pages: Sequence[int]) -> None:
        """Make free pages IN_FLIGHT: write_pages() will store their residuals."""

    def finish(self, pages: Iterable[int]) -> None:
        """Make IN_FLIGHT pages readable once all their layers are written."""

    def release(self, page: int) -> None:
        """Forget the residual of a freed page, wherever it is."""

    def write_pages(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """Store the residuals of distinct landing pages. records: [N, num_layers, num_kv_heads,
        record_bytes] uint8 on the CPU; the caller must not change them afterwards."""

    def read_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of pages' residuals, from the cache or the store, in the same shape. Block
        the CPU until the copy is done."""

    @property
    def packed(self) -> PackedRows | None:
        """Return the same pages in the packed form, None if no store holds them so."""

    def missing(self, pages: Iterable[int]) -> list[int]:
        """Return the pages whose residual is in the store only, in the given order."""

    def start_fetch(self, pages: Iterable[int]) -> None:
        """Start to copy STORED pages into cache slots. Raises CapacityError when too few slots are
        free."""

    def finish_fetches(self) -> None:
        """Make pages RESIDENT whose copy is done."""

    def await_fetches(self, pages: Iterable[int]) -> None:
        """Make FETCHING pages RESIDENT for work that is enqueued after this call."""

    def take_fetch_times(self) -> list[tuple[int, float]]:
        """Return and forget (bytes, seconds) of finished fetches."""

    def evict(self, pages: Collection[int]) -> None:
        """Give up the cache slots of RESIDENT or FETCHING pages. The store has their residuals."""

    def check_integrity(self) -> None:
        """Raise AssertionError when pools and tables disagree."""
