"""Residual cache and residual store behind one page table."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from sglang_kvspec.core.errors import CapacityError, ConfigError
from sglang_kvspec.core.units import GIB
from sglang_kvspec.kv.checksums import Checksums
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.host_copies import MOST_TIMED
from sglang_kvspec.kv.page_slots import OwnSlots, PageSlots
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_table import PageRef, ResidualState, ResidualTable
from sglang_kvspec.planning.capacity import CapacityPlan


class ResidualCache:
    """Every encoded page's residual: written through to the store, cached while there is room.

    Without a store (plan.host_pages == 0) the cache holds all pages and nothing is ever fetched.
    A fetch is started in one iteration and may be used from the next one on, when `finish_fetches`
    has seen the copy complete and the page still be of the generation that was asked for.
    """

    # Whether all layers of a page lie in one run of memory, in cache and store.
    by_page = False

    def __init__(
        self,
        geometry: KVGeometry,
        plan: CapacityPlan,
        record_bytes: int,
        device: torch.device,
    ) -> None:
        self.table = ResidualTable(plan.num_pages)
        self.page_bytes = plan.page_bytes.residual
        self.cache_slots = (
            OwnSlots(plan.num_pages, device)
            if plan.cache_pages >= plan.num_pages
            else PageSlots(plan.num_pages, plan.cache_pages, device)
        )
        heads, layers = geometry.num_kv_heads, geometry.num_layers
        self._cache = RecordPool(
            layers, plan.cache_pages, heads, record_bytes, device, by_page=self.by_page
        )
        self._store: RecordPool | None = None
        if plan.host_pages:
            with _config_error_on_oom(plan.host_bytes):
                self._store = RecordPool(
                    layers,
                    plan.num_pages + 1,
                    heads,
                    record_bytes,
                    torch.device("cpu"),
                    pinned=device.type == "cuda",
                    by_page=self.by_page,
                )
        self._checksums: Checksums | None = None
        # Pages whose residual is lost, and those computed from it.
        self._spoiled: set[int] = set()
        self._device = device
        self._fetching: list[PageRef] = []
        # Older ones are forgotten where nobody asks.
        self._fetch_times: deque[tuple[int, float]] = deque(maxlen=MOST_TIMED)
        self.bytes_fetched = 0
        self.bytes_streamed = 0

    @property
    def hbm_nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def cache(self) -> RecordPool:
        return self._cache

    def cache_layer(self, layer: int) -> torch.Tensor:
        """The cache's records of a layer: [cache_pages, num_kv_heads, record_bytes] uint8."""
        return self._cache.layer(layer)

    def keep_checksums(self) -> None:
        """Notice from now on when a page changes in the store. Before the first page is encoded."""
        assert self._store is not None, "without a store there is nothing to check"
        self._checksums = Checksums(self._store.num_layers)

    @property
    def is_checked(self) -> bool:
        return self._checksums is not None

    def find_spoiled(self, pages: Iterable[int]) -> list[int]:
        """Those of `pages` whose residual cannot be read right any more: they are not as they were
        written, or were computed from such. Pages in the cache are right. Without checksums it is
        not noticed."""
        if self._checksums is None:
            return []
        assert self._store is not None
        pages = list(dict.fromkeys(pages))
        in_store = (ResidualState.STORED, ResidualState.FETCHING)
        read = [p for p in pages if self.table.state(p) in in_store and p not in self._spoiled]
        rows, wrong = torch.tensor(read, dtype=torch.int64), set[int]()
        for layer in range(self._store.num_layers):
            wrong.update(self._checksums.wrong(layer, read, self._store.read(layer, rows)))
        for page in wrong:
            self._spoil(page)
        return [page for page in pages if page in self._spoiled]

    def spoil(self, pages: Iterable[int]) -> None:
        """These pages are computed from spoiled ones: nobody may read them until they are freed."""
        self._spoiled.update(pages)

    def _spoil(self, page: int) -> None:
        assert self._store is not None
        self._spoiled.add(page)
        # A forward of others may still read it for a request that fails: as a number, not NaN.
        for layer in range(self._store.num_layers):
            self._store.layer(layer)[page] = 0

    def begin(self, pages: Iterable[int]) -> None:
        """These pages will be encoded layer by layer; they are born in the cache if it has room."""
        for page in pages:
            self.table.advance(page, ResidualState.IN_FLIGHT)
            if self.cache_slots.num_free:
                self.cache_slots.acquire(page)

    def begin_landing(self, pages: Iterable[int]) -> None:
        """The same for records that come from elsewhere."""
        self.begin(pages)

    def write(self, layer: int, pages: torch.Tensor, records: torch.Tensor) -> None:
        """Records [N, num_kv_heads, record_bytes] of one layer of pages [N] that are IN_FLIGHT."""
        if self._store is not None:
            pages_host, records_host = pages.cpu(), records.cpu()
            if self._checksums is not None:
                self._checksums.note(layer, pages_host.tolist(), records_host)
            self._store.write(layer, pages_host, records_host)
        slots = self.cache_slots.table[pages]
        cached = slots >= 0
        if bool(cached.any()):
            self._cache.write(layer, slots[cached], records[cached])

    def finish(self, pages: Iterable[int]) -> None:
        """All layers of these pages are written."""
        for page in pages:
            cached = page in self.cache_slots
            self.table.advance(page, ResidualState.RESIDENT if cached else ResidualState.STORED)

    def missing(self, pages: Iterable[int]) -> list[int]:
        """Pages whose residual is in the store only, in the given order."""
        return self.table.pages_in(pages, ResidualState.STORED)

    def start_fetch(self, pages: Iterable[int]) -> None:
        """Copy STORED pages into cache slots, but none that is spoiled. Raises CapacityError when
        the cache is full."""
        pages = list(pages)
        spoiled = self.find_spoiled(pages)
        begun, num_bytes = time.perf_counter(), 0
        for page in pages:
            if page in spoiled:
                continue
            if not self.cache_slots.num_free:
                raise CapacityError(f"no cache slot to fetch page {page} into")
            self.table.advance(page, ResidualState.FETCHING)
            self.cache_slots.acquire(page)
            self._fetching.append(self.table.ref(page))
            self._copy_to_cache(page)
            num_bytes += self.page_bytes
        self.bytes_fetched += num_bytes
        if num_bytes:
            self._fetch_times.append((num_bytes, time.perf_counter() - begun))

    def take_fetch_times(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of fetches that are over and were not told yet."""
        times = list(self._fetch_times)
        self._fetch_times.clear()
        return times

    def finish_fetches(self) -> None:
        """Make the pages whose copy has completed RESIDENT; forget those freed meanwhile."""
        for ref in self._fetching:
            if self.table.is_current(ref):
                self.table.advance(ref.page, ResidualState.RESIDENT)
        self._fetching.clear()

    def prefetch(self, pages: Iterable[int]) -> None:
        """Make what is STORED of these pages RESIDENT, the first ones first, as far as slots are
        free: what is about to be read is copied once, and stays for the reads after it."""
        missing = self.missing(dict.fromkeys(pages))
        self.start_fetch(missing[: self.cache_slots.num_free])
        self.finish_fetches()

    def evict(self, pages: Iterable[int]) -> None:
        """Give the cache slots of RESIDENT or FETCHING pages back; the store still has them."""
        assert self._store is not None, "without a store a residual lives in the cache alone"
        leaving = set(pages)
        for page in leaving:
            self.table.advance(page, ResidualState.STORED)
            self.cache_slots.release(page)
        self._fetching = [ref for ref in self._fetching if ref.page not in leaving]

    def release(self, page: int) -> None:
        """The page was freed by SGLang: forget its residual wherever it is."""
        self.table.release(page)
        self.cache_slots.release(page)
        self._spoiled.discard(page)

    def read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Records [N, num_kv_heads, record_bytes] of one layer, on the device.

        Pages that are not RESIDENT are streamed from the store for this read alone, which is how
        prefill over a cached prefix and verifications larger than the cache reach the target.
        """
        records, num_streamed = self._gather(layer, pages)
        self.bytes_streamed += num_streamed * records[:1].nbytes
        return records

    def peek(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """The same for whoever keeps a copy: no forward waits for it, so it does not count."""
        return self._gather(layer, pages)[0]

    def check_readable(self, pages: Iterable[int]) -> list[ResidualState]:
        """The states of these pages. Raises AssertionError for one whose residual is nowhere, or
        not there yet."""
        lacking = {ResidualState.ABSENT, ResidualState.IN_FLIGHT}
        states = [self.table.state(page) for page in pages]
        assert lacking.isdisjoint(states), "a page without a residual was read"
        return states

    def _gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Records, and how many of them came from the store."""
        slots = self.cache_slots.table[pages]
        states = self.check_readable(pages.tolist())
        resident = torch.tensor(
            [state is ResidualState.RESIDENT for state in states],
            dtype=torch.bool,
            device=slots.device,
        )
        if bool(resident.all()):
            return self._cache.read(layer, slots), 0
        assert self._store is not None
        streamed = self._store.read(layer, pages[~resident].cpu()).to(self._device)
        if not bool(resident.any()):
            return streamed, len(streamed)
        out = streamed.new_empty((len(pages), *streamed.shape[1:]))
        out[resident] = self._cache.read(layer, slots[resident])
        out[~resident] = streamed
        return out, len(streamed)

    def _copy_to_cache(self, page: int) -> None:
        assert self._store is not None
        host = torch.tensor([page])
        slot = self.cache_slots.table[page : page + 1]
        for layer in range(self._cache.num_layers):
            self._cache.write(layer, slot, self._store.read(layer, host).to(self._device))

    def check_integrity(self) -> None:
        self.cache_slots.check_integrity()
        in_cache = {ResidualState.FETCHING, ResidualState.RESIDENT, ResidualState.IN_FLIGHT}
        for page in self.cache_slots:
            state = self.table.state(page)
            assert state in in_cache, f"page {page} is {state.name} but has a cache slot"
        counts = self.table.counts()
        num_cached = counts["FETCHING"] + counts["RESIDENT"]
        assert num_cached <= len(self.cache_slots), "a cached page has no cache slot"


@contextmanager
def _config_error_on_oom(num_bytes: int) -> Iterator[None]:
    """Turn a failed allocation into ConfigError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"the residual store of {num_bytes / GIB:.1f} GiB does not fit into host memory: "
            "lower --kvspec-host-gb or --max-total-tokens"
        ) from error
