"""Residual cache and, in CPU memory, a residual store that forwards read directly."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_kvspec.core.errors import CapacityError, ConfigError
from sglang_kvspec.core.units import GIB
from sglang_kvspec.kv.corrupt_pages import CorruptPages
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.host_copies import MOST_TIMED
from sglang_kvspec.kv.record_copies import RecordCopies
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_pages import PackedRows, ResidualPages
from sglang_kvspec.kv.residual_table import PageRef, ResidualState
from sglang_kvspec.planning.capacity import CapacityPlan


class ResidualCache:
    """Residual cache with write-through to a residual store. New pages enter it while it has room.

    Without a store (plan.host_pages == 0) the cache holds all pages and nothing is ever fetched.
    A page that is fetched in one iteration may be used from the next one on. `finish_fetches` makes
    it RESIDENT, unless it was freed meanwhile.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        plan: CapacityPlan,
        record_bytes: int,
        device: torch.device,
        copies: RecordCopies,
    ) -> None:
        """record_bytes: size of the residual of a page, layer and KV head. copies: moves records
        between the CPU and the cache's memory. The attribute `store` has the records of the
        residual store by page; None without a store. Raises ConfigError when the store does not
        fit into host memory."""
        self._pages = ResidualPages(plan, device)
        self.table, self.cache_slots = self._pages.table, self._pages.slots
        self._page_bytes = plan.page_bytes.residual
        heads, layers = geometry.num_kv_heads, geometry.num_layers
        self._cache = RecordPool(layers, plan.cache_pages, heads, record_bytes, device)
        self.packed: PackedRows | None = None
        self.store: RecordPool | None = None
        if plan.host_pages:
            cpu = torch.device("cpu")
            with config_error_on_oom(plan.host_bytes):
                self.store = RecordPool(layers, plan.num_pages + 1, heads, record_bytes, cpu)
        self.corrupt: CorruptPages | None = None
        self._device, self._copies = device, copies
        self._fetching: list[PageRef] = []
        # The oldest times are dropped if take_fetch_times() is not called.
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
        """Return the cache's records of a layer: [cache_pages, num_kv_heads, record_bytes]
        uint8."""
        return self._cache.layer(layer)

    def keep_checksums(self) -> None:
        """Detect pages that change in the store. Call before the first page is encoded."""
        assert self.store is not None, "checksums need a residual store"
        self.corrupt = CorruptPages(self.store, self.table)

    def begin(self, pages: Iterable[int]) -> None:
        """Make pages IN_FLIGHT that will be encoded layer by layer, in cache slots while any are
        free."""
        for page in pages:
            self.table.advance(page, ResidualState.IN_FLIGHT)
            if self.cache_slots.num_free:
                self.cache_slots.acquire(page)

    def begin_landing(self, pages: Iterable[int]) -> None:
        """Make pages IN_FLIGHT whose records come from elsewhere, in cache slots as begin()."""
        self.begin(pages)

    def write(self, layer: int, pages: torch.Tensor, records: torch.Tensor) -> None:
        """Write records [N, num_kv_heads, record_bytes] of a layer of IN_FLIGHT pages [N]."""
        if self.store is not None:
            pages_host, records_host = pages.cpu(), records.cpu()
            if self.corrupt is not None:
                self.corrupt.note(layer, pages_host.tolist(), records_host)
            self.store.write(layer, pages_host, records_host)
        slots = self.cache_slots.table[pages]
        cached = slots >= 0
        if bool(cached.any()):
            self._cache.write(layer, slots[cached], records[cached])

    def finish(self, pages: Iterable[int]) -> None:
        """Make pages readable whose layers are all written."""
        self._pages.finish(pages)

    def write_pages(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """Store records [N, num_layers, num_kv_heads, record_bytes] of distinct pages."""
        if self.store is None:
            self._copies.write(self._cache, self._slots_of(pages), records)
            return
        ids, records = self._ids(pages), records.to(self._device)
        for layer in range(self._cache.num_layers):
            self.write(layer, ids, records[:, layer])

    def read_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """Return such records on the CPU. Does not count as streaming, since no forward waits for
        them."""
        if self.store is None:
            self._pages.check_readable(pages)
            return self._copies.read(self._cache, self._slots_of(pages))
        layers, ids = range(self._cache.num_layers), self._ids(pages)
        return torch.stack([self._gather(layer, ids)[0] for layer in layers], dim=1).cpu()

    def missing(self, pages: Iterable[int]) -> list[int]:
        """Return the pages whose residual is in the store only, in the given order."""
        return self._pages.missing(pages)

    def start_fetch(self, pages: Iterable[int]) -> None:
        """Copy STORED pages into cache slots, except corrupt ones. Raises CapacityError when the
        cache is full."""
        pages = list(pages)
        corrupt = [] if self.corrupt is None else self.corrupt.find(pages)
        begun, num_bytes = time.perf_counter(), 0
        for page in pages:
            if page in corrupt:
                continue
            if not self.cache_slots.num_free:
                raise CapacityError(
                    f"cannot fetch the residual of page {page}: no cache slot is free"
                )
            self.table.advance(page, ResidualState.FETCHING)
            self.cache_slots.acquire(page)
            self._fetching.append(self.table.ref(page))
            self._copy_to_cache(page)
            num_bytes += self._page_bytes
        self.bytes_fetched += num_bytes
        if num_bytes:
            self._fetch_times.append((num_bytes, time.perf_counter() - begun))

    def take_fetch_times(self) -> list[tuple[int, float]]:
        """Return and forget (bytes, seconds) of finished fetches."""
        times = list(self._fetch_times)
        self._fetch_times.clear()
        return times

    def finish_fetches(self) -> None:
        """Make fetched pages RESIDENT, and forget pages that were freed meanwhile."""
        for ref in self._fetching:
            if self.table.is_current(ref):
                self.table.advance(ref.page, ResidualState.RESIDENT)
        self._fetching.clear()

    def await_fetches(self, pages: Iterable[int]) -> None:
        """Make all FETCHING pages RESIDENT: start_fetch() has copied them already."""
        self.finish_fetches()

    def prefetch(self, pages: Iterable[int]) -> None:
        """Make STORED pages among these RESIDENT, the first ones first, while slots are free. Each
        of them is copied once, and stays in the cache for later reads."""
        missing = self.missing(dict.fromkeys(pages))
        self.start_fetch(missing[: self.cache_slots.num_free])
        self.finish_fetches()

    def evict(self, pages: Iterable[int]) -> None:
        """Give up the cache slots of RESIDENT or FETCHING pages. The store has their residuals."""
        assert self.store is not None, "eviction needs a residual store"
        leaving = set(pages)
        for page in leaving:
            self.table.advance(page, ResidualState.STORED)
            self.cache_slots.release(page)
        self._fetching = [ref for ref in self._fetching if ref.page not in leaving]

    def release(self, page: int) -> None:
        """Forget the residual of a page that SGLang freed, in the cache and in the store."""
        self.table.release(page)
        self.cache_slots.release(page)
        if self.corrupt is not None:
            self.corrupt.release(page)

    def read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Return records [N, num_kv_heads, record_bytes] of one layer, on the device.

        Pages that are not RESIDENT are streamed from the store for this read only. Prefills over a
        cached prefix and verifications larger than the cache read them so.
        """
        records, num_streamed = self._gather(layer, pages)
        self.bytes_streamed += num_streamed * records[:1].nbytes
        return records

    def _gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the records, and how many of them came from the store."""
        slots = self.cache_slots.table[pages]
        states = self._pages.check_readable(pages.tolist())
        resident = torch.tensor(
            [state is ResidualState.RESIDENT for state in states],
            dtype=torch.bool,
            device=slots.device,
        )
        if bool(resident.all()):
            return self._cache.read(layer, slots), 0
        assert self.store is not None
        streamed = self.store.read(layer, pages[~resident].cpu()).to(self._device)
        if not bool(resident.any()):
            return streamed, len(streamed)
        out = streamed.new_empty((len(pages), *streamed.shape[1:]))
        out[resident] = self._cache.read(layer, slots[resident])
        out[~resident] = streamed
        return out, len(streamed)

    def _copy_to_cache(self, page: int) -> None:
        assert self.store is not None
        host = torch.tensor([page])
        slot = self.cache_slots.table[page : page + 1]
        for layer in range(self._cache.num_layers):
            self._cache.write(layer, slot, self.store.read(layer, host).to(self._device))

    def _ids(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._device)

    def _slots_of(self, pages: Sequence[int]) -> list[int]:
        return [self.cache_slots.slot_of(page) for page in pages]

    def check_integrity(self) -> None:
        """Raise AssertionError when table and slots disagree."""
        self._pages.check_integrity()


@contextmanager
def config_error_on_oom(num_bytes: int) -> Iterator[None]:
    """Turn a failed allocation into ConfigError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"the residual store of {num_bytes / GIB:.1f} GiB does not fit into host memory: "
            "lower --kvspec-host-gb or --max-total-tokens"
        ) from error
