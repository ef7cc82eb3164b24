"""Residual cache of a GPU that does not hold all residuals: pinned host memory has them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from kvspec_kernels.ops.attention_plan import Backend
from sglang_kvspec.codecs.packed_residual import PackedResidual
from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv.copy_streams import CopyStreams, Event, make_copy_stream
from sglang_kvspec.kv.corrupt_pages import CorruptPages
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.host_store import HostStore, RawStore
from sglang_kvspec.kv.packed_pages import PackedPages
from sglang_kvspec.kv.packed_store import PackedStore
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_cache import config_error_on_oom
from sglang_kvspec.kv.residual_pages import PackedRows, ResidualPages
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.kv.transfers import sent_together
from sglang_kvspec.planning.capacity import CapacityPlan


class OffloadedResidualCache:
    """Residual cache in GPU memory, written through to a store in pinned host memory.

    Kernels read and write cache slots only. So a page that a forward reads is fetched before the
    forward, and every page that a forward encodes gets a cache slot first. Where slots run out, the
    least recently used pages are evicted.

    GpuKVCache.placed() calls require(), begin() and place() before the layers, and finish() and
    return_lent_slots() after them. Copies run on other streams; HostCopies orders them on the
    device.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        plan: CapacityPlan,
        record_bytes: int,
        device: torch.device,
        copy_streams: CopyStreams,
        *,
        packed: PackedResidual | None,
        anchors: Callable[[], RecordPool] | None,
        kernels: Backend = "auto",
    ) -> None:
        """plan: with a host store. packed: form of residuals in the store, None for raw ones.
        anchors: returns the pool of anchors, by page, which a packed store reads; None if it lacks
        some, so that the store has its own. kernels: of these. Raises ConfigError when the store
        cannot be allocated or pinned."""
        assert plan.host_pages, "offloading needs a plan with a host store"
        # Only the CPU reads and changes this table. Kernels read a copy, `slots_on_device`.
        self._pages = ResidualPages(plan, torch.device("cpu"))
        self.table, self.cache_slots = self._pages.table, self._pages.slots
        heads, layers = geometry.num_kv_heads, geometry.num_layers
        self._cache = RecordPool(
            layers, plan.cache_pages, heads, record_bytes, device, by_page=True
        )
        num_rows, pinned = plan.num_pages + 1, device.type == "cuda"
        self.store: HostStore
        self._packed_store: PackedStore | None = None
        with config_error_on_oom(plan.host_bytes):
            if packed is None:
                sizes, cpu = (layers, num_rows, heads, record_bytes), torch.device("cpu")
                rows = RecordPool(*sizes, cpu, pinned=pinned, by_page=True)
                self.store = RawStore(self._cache, rows)
            else:
                link = make_copy_stream(device)
                self.store = self._packed_store = PackedStore(
                    self._cache, anchors, packed, num_rows, link, pinned=pinned, kernels=kernels
                )
        self._device = device
        # Only the CPU's residual cache checks the pages that it reads.
        self.corrupt: CorruptPages | None = None
        self.bytes_fetched = 0
        # Kernels read cache slots, never the store.
        self.bytes_streamed = 0
        # [num_pages + 1] int32. The entry of a page without a slot is any valid slot.
        self.slots_on_device = self._slots_of(range(plan.num_pages + 1)).to(device)
        self._copies = HostCopies(self.store, copy_streams)
        self._arrivals: dict[int, Event] = {}
        # By layer: the event after which the pages that the forward fetches by layer are there.
        self._layers_arrive: list[Event] = []
        self._lent: list[int] = []
        self._moved: set[int] = set()
        # Number of forwards so far, and the last forward that used each page.
        self._now = 0
        self._last_use = [0] * (plan.num_pages + 1)

    def warm_up(self) -> None:
        """Copy a page to the store, and back by layer, so that no request waits for compilation.
        Call while no page is in use."""
        assert not len(self.cache_slots), "warm_up() needs a cache without pages, a slot is in use"
        self._copies.copy_out([(1, 0)])
        self._copies.settle([1], lambda page: 0)
        self._copies.main_waits(self._copies.fetch_by_layer([(1, 0)]))
        self.store.forget(1)

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
        """Fetch the residuals that the next forward reads and that are not in the cache. Make the
        forward wait for pages on their way. Until the next call none of these pages makes room.

        by_layer: fetch layer by layer, and let each layer wait for its own part only. Raises
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
        """Make the main stream wait until this layer of the required pages is in the cache."""
        if self._layers_arrive:
            self._copies.main_waits([self._layers_arrive[layer]])

    def begin(self, pages: Iterable[int]) -> None:
        """Make pages IN_FLIGHT that will be encoded layer by layer, and give them cache slots."""
        pages = list(pages)
        for page in pages:
            self.table.advance(page, ResidualState.IN_FLIGHT)
        self._give_slots(pages)

    def begin_landing(self, pages: Iterable[int]) -> None:
        """Make pages IN_FLIGHT whose records come from elsewhere. They land in the store, and enter
        the cache once they are required. So landing needs no cache slots."""
        for page in pages:
            self.table.advance(page, ResidualState.IN_FLIGHT)

    def write_pages(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """Store records [N, num_layers, num_kv_heads, record_bytes] on the CPU of landing pages."""
        self._make_writable(pages)
        self.store.write(pages, records)

    def read_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """Return records of pages, as write_pages() takes them, from the store, which has all.
        Block the CPU until write-throughs of these pages are done."""
        self._make_readable(pages)
        return self.store.read(pages)

    @property
    def packed(self) -> PackedRows | None:
        return self if self._packed_store is not None else None

    @property
    def num_unfit(self) -> int:
        assert self._packed_store is not None, "the store holds raw residuals"
        return self._packed_store.num_unfit

    def read_packed(self, pages: Sequence[int]) -> PackedPages:
        assert self._packed_store is not None, "the store holds raw residuals"
        self._make_readable(pages)
        return self._packed_store.read_packed(pages)

    def write_packed(self, pages: Sequence[int], packed: torch.Tensor, raw_v: torch.Tensor) -> None:
        assert self._packed_store is not None, "the store holds raw residuals"
        self._make_writable(pages)
        self._packed_store.write_packed(pages, packed, raw_v)

    def _make_writable(self, pages: Sequence[int]) -> None:
        """Block the CPU until it may write these rows of the store."""
        assert not any(page in self.cache_slots for page in pages), (
            "a page with a cache slot cannot land: a kernel writes this page"
        )
        # A write-through of the page's former generation may be under way to the same row.
        self._copies.await_rows(pages)

    def _make_readable(self, pages: Sequence[int]) -> None:
        """Block the CPU until these pages are in the store. Raises AssertionError for a page
        without a residual."""
        self._pages.check_readable(pages)
        self._copies.await_rows(pages)
        self._copies.settle(pages, self.cache_slots.slot_of)

    def place(self, pages: Iterable[int]) -> None:
        """Lend slots to pages that the next forward encodes and reads, but that may still change:
        they have a residual for this forward only. Kernels launched after this call find all
        pages."""
        pages = [page for page in pages if page not in self.cache_slots]
        self._give_slots(pages)
        self._lent += pages
        self.sync()

    def sync(self) -> None:
        """Send changed slots to the device, for kernels launched after this call."""
        if self._moved:
            moved = sorted(self._moved)
            told = [torch.tensor(moved), self._slots_of(moved)]
            self.slots_on_device.index_copy_(0, *sent_together(self._device, told))
            self._moved.clear()

    def finish(self, pages: Iterable[int]) -> None:
        """Make pages readable whose layers are all enqueued. Encoded pages are copied from the
        cache to the store; landed pages are there already."""
        pages = list(pages)
        self._pages.finish(pages)
        encoded = [page for page in pages if page in self.cache_slots]
        self._copies.copy_out([(page, self.cache_slots.slot_of(page)) for page in encoded])

    def return_lent_slots(self) -> None:
        """Take back lent slots once the prepared forward is enqueued. Make pages RESIDENT that it
        fetched by layer."""
        if self._layers_arrive:
            last, self._layers_arrive = self._layers_arrive[-1], []
            self.await_fetches([page for page, event in self._arrivals.items() if event is last])
        for page in self._lent:
            self._take_slot(page)
        self._lent.clear()

    # Planned movements

    def start_fetch(self, pages: Iterable[int]) -> None:
        """Start to copy STORED pages into free slots. Raises CapacityError, and fetches nothing,
        when too few slots are free."""
        pages = list(pages)
        if len(pages) > self.cache_slots.num_free:
            raise CapacityError(
                f"{len(pages)} residuals need cache slots, {self.cache_slots.num_free} are free"
            )
        if pages:
            self._arrivals |= dict.fromkeys(pages, self._copies.fetch(self._claim(pages)))

    def _claim(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """Make pages FETCHING, give them slots, and return the sorted (page, slot) pairs."""
        pages = sorted(pages)
        self.table.advance_all(pages, ResidualState.FETCHING)
        for page in pages:
            self._last_use[page] = self._now
        self._moved.update(pages)
        self.bytes_fetched += self.store.link_bytes(pages)
        return list(zip(pages, self.cache_slots.acquire_all(pages), strict=True))

    def finish_fetches(self) -> None:
        """Make pages RESIDENT whose copy is done. Other pages stay FETCHING."""
        events = {id(event): event for event in self._arrivals.values()}
        over = {key for key, event in events.items() if event.query()}
        self._wait_for([page for page, event in self._arrivals.items() if id(event) in over])

    def take_fetch_times(self) -> list[tuple[int, float]]:
        return self._copies.take_fetch_times()

    def await_fetches(self, pages: Iterable[int]) -> None:
        """Make the FETCHING pages among these RESIDENT, for work that is enqueued after this
        call."""
        if self._arrivals:
            self._wait_for([page for page in dict.fromkeys(pages) if page in self._arrivals])

    def evict(self, pages: Iterable[int]) -> None:
        pages = set(pages)
        self._copies.settle(pages, self.cache_slots.slot_of)
        self.table.advance_all(pages, ResidualState.STORED)
        for page in pages & self._arrivals.keys():
            del self._arrivals[page]
        self.cache_slots.release_all(pages)

    def release(self, page: int) -> None:
        self.table.release(page)
        self.store.forget(page)
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
        shortfall = num_pages - self.cache_slots.num_free
        if shortfall <= 0:
            return
        # Pages that are being encoded, or have a lent slot, are in use by this forward.
        in_store = (ResidualState.RESIDENT, ResidualState.FETCHING)
        spare = [
            page
            for page in self.cache_slots
            if self._last_use[page] < self._now and self.table.state(page) in in_store
        ]
        if len(spare) < shortfall:
            raise CapacityError(
                f"one forward needs more residuals than the cache of {self.cache_slots.num_slots} "
                f"pages can hold: {num_pages} must be fetched, only {len(spare)} can be evicted"
            )
        self.evict(sorted(spare, key=self._last_use.__getitem__)[:shortfall])

    def _slots_of(self, pages: Iterable[int]) -> torch.Tensor:
        return torch.tensor(self.cache_slots.slots_of(pages), dtype=torch.int32)

    def check_integrity(self) -> None:
        assert not self._lent, "cache slots are still lent after a forward"
        self._pages.check_integrity()
        for page in self.cache_slots:
            known = page in self._arrivals
            is_fetching = self.table.state(page) is ResidualState.FETCHING
            assert known == is_fetching, f"page {page}: its state and its fetch disagree"
        where = self._slots_of(page for page in self.cache_slots if page not in self._moved)
        told = [page for page in self.cache_slots if page not in self._moved]
        assert torch.equal(self.slots_on_device[told].cpu(), where), (
            "the slot table on the device is out of date"
        )
