"""Pinned host memory that holds residuals of the target exact in the packed form.

The link moves half of the bytes of raw residuals in bf16, and the device packs and unpacks. Rows of
pages have one size, with room for V of one of RECORDS_A_SPARE records that do not fit. V of more
records of a page lies in ordinary host memory, so that no page is refused, whatever its values.

Which records do not fit is known once a page was packed. The CPU asks before the page loses its
cache slot: until then the page is *doubtful*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch

from sglang_kvspec.codecs.packed_residual import PackedResidual
from sglang_kvspec.kv.copy_streams import CopyStream
from sglang_kvspec.kv.packed_pages import PackedPages
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.transfers import send_into, to_device
from sglang_kvspec.planning.record_bytes import COUNT_BYTES, spare_rows

T = TypeVar("T")

# Raw bytes that are packed or unpacked at once.
AT_ONCE_BYTES = 64 << 20


def work_bytes(raw_page_bytes: int) -> int:
    """Return the device memory that this takes: in each of three streams raw residuals, their
    anchors and packed records, and V of those that do not fit, together less than 2.6 times
    AT_ONCE_BYTES or a page."""
    return 8 * max(AT_ONCE_BYTES, raw_page_bytes)


class PackedStore:
    """HostStore of packed records."""

    def __init__(
        self,
        cache: RecordPool,
        anchors: Callable[[], RecordPool],
        packed: PackedResidual,
        num_rows: int,
        *,
        pinned: bool,
    ) -> None:
        """cache: by page. anchors: returns the pool of all pages' anchors, which are there when a
        page is written or read. num_rows: row 0 and one for each page."""
        self._cache, self._anchors, self._packed = cache, anchors, packed
        layers, heads = cache.page_shape[:2]
        self._num_records = layers * heads
        self._num_spare = spare_rows(self._num_records)
        cpu = torch.device("cpu")
        shapes = (
            (layers, heads, packed.record_bytes),
            (1, self._num_spare, packed.raw_v_bytes),
            (1, 1, COUNT_BYTES),
        )
        self._records, self._spare, self._counts = (
            RecordPool(num_layers, num_rows, num_heads, num_bytes, cpu, pinned=pinned, by_page=True)
            for num_layers, num_heads, num_bytes in shapes
        )
        self._doubtful: set[int] = set()
        # By page with such records: how many do not fit, and V of those that exceed its row.
        self._unfit: dict[int, int] = {}
        self._more_v: dict[int, torch.Tensor] = {}

    @property
    def form(self) -> str:
        return self._packed.form

    @property
    def num_unfit(self) -> int:
        return sum(self._unfit.values())

    def link_bytes(self, pages: Sequence[int]) -> int:
        num_unfit = sum(map(self._num_unfit, pages))
        packed = len(pages) * self._num_records * self._packed.record_bytes
        return packed + num_unfit * self._packed.raw_v_bytes

    # To the store

    def put(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        for pairs in self._at_once(zip(pages, slots, strict=True)):
            self._put(stream, *zip(*pairs, strict=True))
        self._doubtful.update(pages)

    def _put(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        with stream.current():
            parts = self._pack(pages, self._cache.read_pages(self._index(slots)))
        for pool, part in zip((self._records, self._spare, self._counts), parts, strict=True):
            stream.copy_pages(pool.pages, pages, part, range(len(pages)))

    def _pack(
        self, pages: Sequence[int], raw: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows of the three pools for raw residuals on the device."""
        records, fits = self._packed.pack_records(
            self._anchors_of(pages).flatten(1, 2), raw.flatten(1, 2)
        )
        # The first records that do not fit, in their order. Behind them, any others.
        first = fits.to(torch.uint8).argsort(dim=1, stable=True)[:, : self._num_spare]
        page = torch.arange(len(pages), device=first.device)[:, None]
        spare = self._packed.v_of(raw.flatten(1, 2))[page, first]
        counts = torch.zeros((len(pages), COUNT_BYTES // 4), dtype=torch.int32, device=fits.device)
        counts[:, 0] = (~fits).sum(1)
        return (
            records.view(len(pages), *self._records.page_shape),
            spare[:, None],
            counts.view(torch.uint8)[:, None, None],
        )

    def doubtful(self, pages: Sequence[int]) -> list[int]:
        return [page for page in pages if page in self._doubtful]

    def settle(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        for page, slot in zip(pages, slots, strict=True):
            self._doubtful.discard(page)
            if self._note_unfit(page) > self._num_spare:
                with stream.current():
                    self._more_v[page] = self._more_of(page, self._cache.page(slot))

    def _note_unfit(self, page: int) -> int:
        count = int(self._counts.page(page).view(torch.int32)[0, 0, 0])
        if count:
            self._unfit[page] = count
        return count

    def _more_of(self, page: int, raw: torch.Tensor) -> torch.Tensor:
        """Return V of the records that a page's row has no room for: a copy on the CPU. raw: the
        page's raw residuals."""
        unfit = (~self._packed.fits(self._records.page(page))).flatten().nonzero()[:, 0]
        more = to_device(raw.device, unfit[self._num_spare :])
        return self._packed.v_of(raw.flatten(0, 1)[more]).cpu().clone()

    def forget(self, page: int) -> None:
        self._doubtful.discard(page)
        self._unfit.pop(page, None)
        self._more_v.pop(page, None)

    def write(self, pages: Sequence[int], records: torch.Tensor) -> None:
        for some in self._at_once(range(len(pages))):
            part, ids = records[some[0] : some[-1] + 1], [pages[i] for i in some]
            rows = self._pack(ids, to_device(self._device, part))
            for pool, row in zip((self._records, self._spare, self._counts), rows, strict=True):
                pool.write_pages(torch.tensor(ids), row.cpu())
            for page, raw in zip(ids, part, strict=True):
                self.forget(page)
                if self._note_unfit(page) > self._num_spare:
                    self._more_v[page] = self._more_of(page, raw)

    def write_packed(self, pages: Sequence[int], packed: torch.Tensor, raw_v: torch.Tensor) -> None:
        """Store pages in the packed form. packed, raw_v: as in PackedPages, records and raw_v."""
        self._records.write_pages(torch.tensor(pages, dtype=torch.int64), packed)
        counts = (~self._packed.fits(packed)).flatten(1).sum(1).tolist()
        # Foreign pages may say that they miss more rows than there are: zeros then.
        raw_v = torch.nn.functional.pad(raw_v, (0, 0, 0, max(sum(counts) - len(raw_v), 0)))
        for page, count, rows in zip(
            pages, counts, raw_v[: sum(counts)].split_with_sizes(counts), strict=True
        ):
            self.forget(page)
            self._counts.page(page).view(torch.int32)[0, 0, 0] = count
            kept = rows[: self._num_spare]
            self._spare.page(page)[0, : len(kept)] = kept
            if self._note_unfit(page) > self._num_spare:
                self._more_v[page] = rows[self._num_spare :].clone()

    # From the store

    def get(self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]) -> None:
        self._check_settled(pages)
        for pairs in self._at_once(zip(slots, pages, strict=True)):
            self._get(stream, *zip(*pairs, strict=True))

    def _get(self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]) -> None:
        raw_v, first = self._raw_v(stream, pages)
        records = self._empty(stream, (len(pages), *self._records.page_shape))
        stream.copy_pages(records, range(len(pages)), self._records.pages, pages)
        with stream.current():
            begins = to_device(self._device, first)
            raw = self._unpack(self._anchors_of(pages), records, raw_v, begins)
            self._cache.write_pages(self._index(slots), raw)

    def get_by_layer(
        self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]
    ) -> Iterator[None]:
        self._check_settled(pages)
        num_layers = self._cache.num_layers
        if sum(map(self._num_unfit, pages)) * self._packed.raw_v_bytes > AT_ONCE_BYTES:
            # V of all pages would take too much memory at once.
            self.get(stream, slots, pages)
            yield from (None for _ in range(num_layers))
            return
        raw_v, first = self._raw_v(stream, pages)
        with stream.current():
            first = to_device(self._device, first)
            sources, targets = self._index(pages), self._index(slots)
        step = max(1, AT_ONCE_BYTES // self._cache.layer(0)[0].nbytes)
        for layer in range(num_layers):
            for begin in range(0, len(pages), step):
                some = slice(begin, begin + step)
                self._get_layer(stream, layer, targets[some], sources[some], raw_v, first[some])
            yield

    def _get_layer(
        self,
        stream: CopyStream,
        layer: int,
        slots: torch.Tensor,
        pages: torch.Tensor,
        raw_v: torch.Tensor,
        first: torch.Tensor,
    ) -> None:
        """Do the work of get() for a layer. first: [N], the rows of raw_v before those of this
        layer; set to those before the next layer's."""
        records = self._empty(stream, (len(pages), *self._records.page_shape[1:]))
        with stream.current():
            rows = torch.arange(len(pages), device=self._device)
        stream.copy_rows(records, rows, self._records.layer(layer), pages)
        with stream.current():
            anchors = self._anchors().read(layer, pages)
            raw = self._unpack(anchors[:, None], records[:, None], raw_v, first)
            first += (~self._packed.fits(records)).sum(1)
            self._cache.write(layer, slots, raw[:, 0])

    def _raw_v(self, stream: CopyStream, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return V of all records of these pages that do not fit, on the device, and the place of
        each page's first row there, on the CPU."""
        counts = list(map(self._num_unfit, pages))
        rows = self._empty(stream, (sum(counts), self._packed.raw_v_bytes))
        sources: list[int] = []
        targets: list[int] = []
        first, begin = [], 0
        for page, count in zip(pages, counts, strict=True):
            first.append(begin)
            spare = min(count, self._num_spare)
            targets += range(begin, begin + spare)
            sources += range(page * self._num_spare, page * self._num_spare + spare)
            if count > spare:
                with stream.current():
                    send_into([(rows[begin + spare : begin + count], self._more_v[page])])
            begin += count
        if sources:
            stream.copy_pages(rows, targets, self._spare.pages.flatten(0, 2), sources)
        return rows, torch.tensor(first, dtype=torch.int64)

    def _unpack(
        self,
        anchors: torch.Tensor,
        records: torch.Tensor,
        raw_v: torch.Tensor,
        first: torch.Tensor,
    ) -> torch.Tensor:
        """Return raw residuals of layers of pages, [N, layers, num_kv_heads, record_bytes]. first:
        [N], the rows of raw_v before those of these layers."""
        flat = records.flatten(1, 2)
        ranks = first[:, None] + (~self._packed.fits(flat)).cumsum(1)
        raw = self._packed.unpack_records(anchors.flatten(1, 2), flat, raw_v, ranks)
        return raw.view(*records.shape[:3], raw.shape[-1])

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        parts = [torch.empty((0, *self._cache.page_shape), dtype=torch.uint8)]
        for some in self._at_once(pages):
            packed = self.read_packed(some)
            counts = torch.tensor(list(map(self._num_unfit, some)))
            there = [
                to_device(self._device, part)
                for part in (packed.records, packed.raw_v, counts.cumsum(0) - counts)
            ]
            parts.append(self._unpack(self._anchors_of(some), *there).cpu())
        return torch.cat(parts)

    def read_packed(self, pages: Sequence[int]) -> PackedPages:
        """Return pages in the packed form, as read() does."""
        self._check_settled(pages)
        records = self._records.read_pages(torch.tensor(pages, dtype=torch.int64))
        raw_v = [torch.empty((0, self._packed.raw_v_bytes), dtype=torch.uint8)]
        for page in pages:
            if count := self._num_unfit(page):
                raw_v.append(self._spare.page(page)[0, :count])
            if page in self._more_v:
                raw_v.append(self._more_v[page])
        return PackedPages(records, self._packed.fits(records), torch.cat(raw_v))

    # Helpers

    def _num_unfit(self, page: int) -> int:
        return self._unfit.get(page, 0)

    def _check_settled(self, pages: Sequence[int]) -> None:
        # Rows of V that are not known would be taken from other pages.
        doubtful = self.doubtful(pages)
        assert not doubtful, f"page {doubtful[0]} must be settled before it is read"

    def _empty(self, stream: CopyStream, shape: Sequence[int]) -> torch.Tensor:
        with stream.current():
            return torch.empty(shape, dtype=torch.uint8, device=self._device)

    @property
    def _device(self) -> torch.device:
        return self._cache.layer(0).device

    def _at_once(self, items: Iterable[T]) -> Iterator[tuple[T, ...]]:
        """Yield items of as many pages as are packed or unpacked at once."""
        left, step = iter(items), max(1, AT_ONCE_BYTES // self._cache.page(0).nbytes)
        while some := tuple(islice(left, step)):
            yield some

    def _anchors_of(self, pages: Sequence[int]) -> torch.Tensor:
        """Return anchors of pages, [N, num_layers, num_kv_heads, anchor_bytes]."""
        return self._anchors().read_pages(self._index(pages))

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(self._device, torch.tensor(numbers, dtype=torch.int64))
