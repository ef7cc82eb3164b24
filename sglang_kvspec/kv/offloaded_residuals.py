"""Residuals of a GPU whose cache does not hold them all: the others are in pinned host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv.copy_streams import CopyStreams, Event
from sglang_kvspec.kv.corrupt_pages import CorruptPages
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_cache import config_error_on_oom
from sglang_kvspec.kv.residual_pages import ResidualPages
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.kv.transfers import sent_together
from sglang_kvspec.planning.capacity import CapacityPlan


class OffloadedResidualCache:
    """Residual cache in GPU memory, written through to a store in pinned host memory.

    Kernels read and write cache slots only. So a page that a forward reads is fetched before the
    forward, and every page that a forward encodes is born in the cache. The page that was not used
    for the longest time makes room.

    GpuKVCache.forward() calls require(), begin() and place(), then, behind the layers, finish() and
    take_back(). Copies run beside all that; HostCopies orders them on the device.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        plan: CapacityPlan,
        record_bytes: int,
        device: torch.device,
        copy_streams: CopyStreams,
    ) -> None:
        """plan: with a host store. Raises ConfigError when the store cannot be allocated or
        pinned."""
        assert plan.host_pages, "without a store nothing is copied"
        # Looked up and changed by the CPU; kernels have a copy, `slots_on_device`.
        self._pages = ResidualPages(plan, torch.device("cpu"))
        self.table, self.cache_slots = self._pages.table, self._pages.slots
        self._page_bytes = plan.page_bytes.residual
        heads, layers = geometry.num_kv_heads, geometry.num_layers
        self._cache = RecordPool(
            layers, plan.cache_pages, heads, record_bytes, device, by_page=True
        )
        with config_error_on_oom(plan.host_bytes):
            self.store = RecordPool(
                layers,
                plan.num_pages + 1,
                heads,
                record_bytes,
                torch.device("cpu"),
                pinned=device.type == "cuda",
                by_page=True,
            )
        self._device = device
        # Only the reference checks what it reads.
        self.corrupt: CorruptPages | None = None
        self.bytes_fetched = 0
        # Kernels read cache slots, never the store.
        self.bytes_streamed = 0
        # [num_pages + 1] int32. Of a page without a slot the entry is any valid slot.
        self.slots_on_device = self._slots_of(range(plan.num_pages + 1)).to(device)
        self._copies = HostCopies(self._cache, self.store, copy_streams)
        self._arrivals: dict[int, Event] = {}
        # When each layer of what the present forward fetches by layer is there.
        self._layers_arrive: list[Event] = []
        self._lent: list[int] = []
        self._moved: set[int] = set()
        # Forwards so far, and the last one that used a page.
        self._now = 0
        self._last_use = [0] * (plan.num_pages + 1)

    def warm_up(self) -> None:
        """Copy once what serving copies, while no page is in use, so that nothing is compiled for a
        request."""
        assert not len(self.cache_slots), "a slot is in use"
        self._copies.main_waits(self._copies.fetch_by_layer([(1, 0)]))

    @property
    def hbm_nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def cache(self) -> RecordPool:
        return self._cache

    def cache_layer(self, layer: int) -> torch.Tensor:
        """Return the cache's records of a layer: [cache_pages, num_kv_heads, record_bytes]
        uint8."""
        return self._cache.layer(layer)

    def missing(self, pages: Iterable[int]) -> list[int]:
        """Return the pages whose residual is in the store only, in the given order."""
        return self._pages.missing(pages)

    # A forward

    def require(self, pages: Iterable[int], *, by_layer: bool = False) -> None:
        """The next forward reads these pages' residuals: fetch those that are not in the cache, and
        make the forward wait for those on their way. Until the next call none of them makes room.

        by_layer: fetch layer by layer, and let each layer wait for its own part alone. Raises
        CapacityError when the cache cannot hold all pages at once.
        """
        self._now += 1
        needed = list(dict.fromkeys(pages))
        for page in needed:
            self._last_use[page] = self._now
        absent = self.table.pages_in(needed, ResidualState.ABSENT)
        assert not absent, f"page {absent[0]} has no residual to read"
        missing = self.missing(needed)
        self._make_room(len(missing))
        if by_layer and missing:
            self.await_fetches(needed)
            self._layers_arrive = self._copies.fetch_by_layer(self._claim(missing))
            self._arrivals |= dict.fromkeys(missing, self._layers_arrive[-1])
            return
        self.start_fetch(missing)
        self.await_fetches(needed)

    def await_layer(self, layer: int) -> None:
        """What is enqueued from now on reads this layer of the pages that were required."""
        if self._layers_arrive:
            self._copies.main_waits([self._layers_arrive[layer]])

    def begin(self, pages: Iterable[int]) -> None:
        """These pages will be encoded layer by layer, into the cache."""
        pages = list(pages)
        for page in pages:
            self.table.advance(page, ResidualState.IN_FLIGHT)
        self._give_slots(pages)

    def begin_landing(self, pages: Iterable[int]) -> None:
        """These pages come from elsewhere: into the store, and into the cache once they are
        required, so that there is room for them whatever forwards need."""
        for page in pages:
            self.table.advance(page, ResidualState.IN_FLIGHT)

    def write_pages(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """Records [N, num_layers, num_kv_heads, record_bytes] on the CPU of landing pages."""
        assert not any(page in self.cache_slots for page in pages), "a kernel writes this page"
        # The copy of a page that was freed may be under way to the same row.
        self._copies.await_rows(pages)
        self.store.write_pages(torch.tensor(pages, dtype=torch.int64), records)

    def read_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """Records of pages that have them, as write_pages() takes them, from the store, which has
        all. The CPU waits for what is on its way there."""
        self._pages.check_readable(pages)
        self._copies.await_rows(pages)
        return self.store.read_pages(torch.tensor(pages, dtype=torch.int64))

    def place(self, pages: Iterable[int]) -> None:
        """Lend slots to pages that the next forward encodes and reads, but that may change again:
        they have a residual for this forward only. Kernels launched from now on find all pages."""
        pages = [page for page in pages if page not in self.cache_slots]
        self._give_slots(pages)
        self._lent += pages
        self.sync()

    def sync(self) -> None:
        """Tell kernels launched from now on where pages are."""
        if self._moved:
            moved = sorted(self._moved)
            told = [torch.tensor(moved), self._slots_of(moved)]
            self.slots_on_device.index_copy_(0, *sent_together(self._device, told))
            self._moved.clear()

    def finish(self, pages: Iterable[int]) -> None:
        """All layers of these pages are being written: those in the cache follow into the store,
        and those that landed are there."""
        pages = list(pages)
        self._pages.finish(pages)
        encoded = [page for page in pages if page in self.cache_slots]
        self._copies.copy_out([(page, self.cache_slots.slot_of(page)) for page in encoded])

    def take_back(self) -> None:
        """The forward that was prepared is given to the device."""
        if self._layers_arrive:
            last, self._layers_arrive = self._layers_arrive[-1], []
            self.await_fetches([page for page, event in self._arrivals.items() if event is last])
        for page in self._lent:
            self._take_slot(page)
        self._lent.clear()

    # Planned movements

    def start_fetch(self, pages: Iterable[int]) -> None:
        """Start to copy STORED pages into free slots. Raises CapacityError, and fetches nothing,
        when there are too few."""
        pages = list(pages)
        if len(pages) > self.cache_slots.num_free:
            raise CapacityError(
                f"{len(pages)} residuals to fetch and {self.cache_slots.num_free} free cache slots"
            )
        if pages:
            self._arrivals |= dict.fromkeys(pages, self._copies.fetch(self._claim(pages)))

    def _claim(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """These pages, whose copy is about to start, with their slots."""
        pages = sorted(pages)
        self.table.advance_all(pages, ResidualState.FETCHING)
        for page in pages:
            self._last_use[page] = self._now
        self._moved.update(pages)
        self.bytes_fetched += self._page_bytes * len(pages)
        return list(zip(pages, self.cache_slots.acquire_all(pages), strict=True))

    def finish_fetches(self) -> None:
        """Make pages RESIDENT whose copy is done; others stay on their way."""
        events = {id(event): event for event in self._arrivals.values()}
        over = {key for key, event in events.items() if event.query()}
        self._wait_for([page for page, event in self._arrivals.items() if id(event) in over])

    def take_fetch_times(self) -> list[tuple[int, float]]:
        return self._copies.take_fetch_times()

    def await_fetches(self, pages: Iterable[int]) -> None:
        """Make these pages RESIDENT where they are on their way, for what is enqueued from now
        on."""
        if self._arrivals:
            self._wait_for([page for page in dict.fromkeys(pages) if page in self._arrivals])

    def evict(self, pages: Iterable[int]) -> None:
        pages = set(pages)
        self.table.advance_all(pages, ResidualState.STORED)
        for page in pages & self._arrivals.keys():
            del self._arrivals[page]
        self.cache_slots.release_all(pages)

    def release(self, page: int) -> None:
        self.table.release(page)
        self._take_slot(page)

    # Slots

    def _give_slots(self, pages: Sequence[int]) -> None:
        self._make_room(len(pages))
        slots = self.cache_slots.acquire_all(sorted(pages))
        self._moved.update(pages)
        for page in pages:
            self._last_use[page] = self._now
        self._copies.main_writes(slots)

    def _take_slot(self, page: int) -> None:
        self._arrivals.pop(page, None)
        self.cache_slots.release(page)

    def _wait_for(self, pages: Sequence[int]) -> None:
        self._copies.main_waits([self._arrivals.pop(page) for page in pages])
        self.table.advance_all(pages, ResidualState.RESIDENT)

    def _make_room(self, num_pages: int) -> None:
        lacking = num_pages - self.cache_slots.num_free
        if lacking <= 0:
            return
        # A page that is being encoded, or lent a slot, is in use by this forward.
        in_store = (ResidualState.RESIDENT, ResidualState.FETCHING)
        spare = [
            page
            for page in self.cache_slots
            if self._last_use[page] < self._now and self.table.state(page) in in_store
        ]
        if len(spare) < lacking:
            raise CapacityError(
                f"one forward needs more residuals than the cache of {self.cache_slots.num_slots} "
                f"pages holds: {num_pages} are to come in and {len(spare)} can go"
            )
        self.evict(sorted(spare, key=self._last_use.__getitem__)[:lacking])

    def _slots_of(self, pages: Iterable[int]) -> torch.Tensor:
        return torch.tensor(self.cache_slots.slots_of(pages), dtype=torch.int32)

    def check_integrity(self) -> None:
        assert not self._lent, "slots are lent beyond a forward"
        self._pages.check_integrity()
        for page in self.cache_slots:
            known = page in self._arrivals
            assert known == (self.table.state(page) is ResidualState.FETCHING), f"page {page}"
        where = self._slots_of(page for page in self.cache_slots if page not in self._moved)
        told = [page for page in self.cache_slots if page not in self._moved]
        assert torch.equal(self.slots_on_device[told].cpu(), where), "kernels look elsewhere"
