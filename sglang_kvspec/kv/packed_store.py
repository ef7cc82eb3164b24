"""Pinned host memory that holds residuals of the target exact in the packed form.

The link moves half of the bytes of raw residuals in bf16, and the device packs and unpacks. Rows of
pages have one size, with room for V of one of RECORDS_A_SPARE records that do not fit. V of more
records of a page lies in ordinary host memory, so that no page is refused, whatever its values.

Which records do not fit is known once a page was packed. The CPU asks before the page loses its
cache slot: until then the page is *doubtful*.

Packed records come into one of two buffers while the records of the other one are unpacked, so that
the link does not wait for kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import TypeVar

import torch

from sglang_kvspec.codecs.packed_residual import PackedResidual
from sglang_kvspec.kv.copy_streams import CopyStream, Event
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
    AT_ONCE_BYTES or a page, and two buffers."""
    return 9 * max(AT_ONCE_BYTES, raw_page_bytes)


class PackedStore:
    """HostStore of packed records."""

    def __init__(
        self,
        cache: RecordPool,
        anchors: Callable[[], RecordPool],
        packed: PackedResidual,
        num_rows: int,
        link: CopyStream,
        *,
        pinned: bool,
    ) -> None:
        """cache: by page. anchors: returns the pool of all pages' anchors, which are there when a
        page is written or read. num_rows: row 0 and one for each page. link: a stream of its own,
        for copies to the device."""
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
        # Whole pages, and layers of pages, that are packed or unpacked at once.
        self._most_pages, self._most_layers = (
            max(1, min(AT_ONCE_BYTES // raw.nbytes, num_rows))
            for raw in (cache.page(0), cache.layer(0)[0])
        )
        page = self._records.page(0)
        buffer_bytes = max(self._most_pages * page.nbytes, self._most_layers * page[0].nbytes)
        self._link = link
        self._buffers = torch.empty((2, buffer_bytes), dtype=torch.uint8, device=self._device)
        # By buffer: the point after which it may be written.
        self._unpacked: list[Event | None] = [None, None]
        self._doubtful: set[int] = set()
        # By page with such records: how many do not fit, and V of those that exceed its row.
        self._unfit: dict[int, int] = {}
        self._more_v: dict[int, torch.Tensor] = {}

    @property
    def num_unfit(self) -> int:
        """Records of the settled pages that do not fit."""
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

    def doubtful(self, pages: Iterable[int]) -> list[int]:
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
        return self._packed.v_of(raw.flatten(0, 1))[more].cpu()

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
        # V of all pages may be on its way at once, unless that takes too much memory.
        link = stream if self._has_much_v(pages) else self._link
        link.wait(stream.mark())
        for number, pairs in enumerate(self._at_once(zip(slots, pages, strict=True))):
            self._get(stream, link, number % 2, *zip(*pairs, strict=True))

    def _get(
        self,
        stream: CopyStream,
        link: CopyStream,
        buffer: int,
        slots: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        raw_v, first = self._raw_v(link, pages)
        records = self._buffer(link, buffer, (len(pages), *self._records.page_shape))
        link.copy_pages(records, range(len(pages)), self._records.pages, pages)
        stream.wait(link.mark())
        stream.reads(raw_v)
        with stream.current():
            ranks = self._ranks(records, to_device(self._device, first))
            raw = self._unpack(self._anchors_of(pages), records, raw_v, ranks)
            self._cache.write_pages(self._index(slots), raw)
        self._unpacked[buffer] = stream.mark()

    def get_by_layer(
        self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]
    ) -> Iterator[None]:
        self._check_settled(pages)
        num_layers, step = self._cache.num_layers, self._most_layers
        if self._has_much_v(pages):
            self.get(stream, slots, pages)
            yield from (None for _ in range(num_layers))
            return
        with stream.current():
            sources, targets = self._index(pages), self._index(slots)
            rows = torch.arange(min(step, len(pages)), device=self._device)
        self._link.wait(stream.mark())
        raw_v, counted = self._raw_v(self._link, pages)
        stream.reads(raw_v)
        with stream.current():
            first = to_device(self._device, counted)
        number = 0
        for layer in range(num_layers):
            for begin in range(0, len(pages), step):
                some = slice(begin, begin + step)
                chunk = (sources[some], targets[some], first[some])
                self._get_layer(stream, number % 2, layer, rows, raw_v, *chunk)
                number += 1
            yield

    def _get_layer(
        self,
        stream: CopyStream,
        buffer: int,
        layer: int,
        rows: torch.Tensor,
        raw_v: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        first: torch.Tensor,
    ) -> None:
        """Do the work of get() for a layer. rows: numbers from 0, at least as many as pages. first:
        [N], the rows of raw_v before those of this layer; set to those before the next layer's."""
        link, rows = self._link, rows[: len(pages)]
        records = self._buffer(link, buffer, (len(pages), *self._records.page_shape[1:]))
        link.copy_rows(records, rows, self._records.layer(layer), pages)
        stream.wait(link.mark())
        with stream.current():
            anchors = self._anchors().read(layer, pages)
            ranks = self._ranks(records[:, None], first)
            raw = self._unpack(anchors[:, None], records[:, None], raw_v, ranks)
            first.copy_(ranks[:, -1])
            self._cache.write(layer, slots, raw[:, 0])
        self._unpacked[buffer] = stream.mark()

    def _buffer(self, link: CopyStream, buffer: int, shape: Sequence[int]) -> torch.Tensor:
        """Return a buffer in this shape, for work that `link` is given after this call."""
        if (event := self._unpacked[buffer]) is not None:
            link.wait(event)
        return self._buffers[buffer, : prod(shape)].view(*shape)

    def _has_much_v(self, pages: Sequence[int]) -> bool:
        """Return True if V of the records that do not fit takes more memory than is kept for V on
        its way."""
        return sum(map(self._num_unfit, pages)) * self._packed.raw_v_bytes > AT_ONCE_BYTES // 4

    def _raw_v(self, stream: CopyStream, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return V of all records of these pages that do not fit, on the device, and the place of
        each page's first row there, on the CPU."""
        counts = list(map(self._num_unfit, pages))
        shape = (sum(counts), self._packed.raw_v_bytes)
        with stream.current():
            rows = torch.empty(shape, dtype=torch.uint8, device=self._device)
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

    def _ranks(self, records: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Return the row of V, counted from 1, of each record that does not fit: [N, layers *
        num_kv_heads]. Others have that of the last one before them. records: of layers of pages.
        first: [N], the rows before those of these layers."""
        return first[:, None] + (~self._packed.fits(records)).flatten(1).cumsum(1)

    def _unpack(
        self,
        anchors: torch.Tensor,
        records: torch.Tensor,
        raw_v: torch.Tensor,
        ranks: torch.Tensor,
    ) -> torch.Tensor:
        """Return raw residuals of layers of pages, [N, layers, num_kv_heads, record_bytes]."""
        flat = (anchors.flatten(1, 2), records.flatten(1, 2))
        raw = self._packed.unpack_records(*flat, raw_v, ranks)
        return raw.view(*records.shape[:3], raw.shape[-1])

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        parts = [torch.empty((0, *self._cache.page_shape), dtype=torch.uint8)]
        for some in self._at_once(pages):
            packed = self.read_packed(some)
            counts = torch.tensor(list(map(self._num_unfit, some)))
            ranks = self._ranks(packed.records, counts.cumsum(0) - counts)
            there = [
                to_device(self._device, part) for part in (packed.records, packed.raw_v, ranks)
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

    @property
    def _device(self) -> torch.device:
        return self._cache.layer(0).device

    def _at_once(self, items: Iterable[T]) -> Iterator[tuple[T, ...]]:
        """Yield items of as many pages as are packed or unpacked at once."""
        left = iter(items)
        while some := tuple(islice(left, self._most_pages)):
            yield some

    def _anchors_of(self, pages: Sequence[int]) -> torch.Tensor:
        """Return anchors of pages, [N, num_layers, num_kv_heads, anchor_bytes]."""
        return self._anchors().read_pages(self._index(pages))

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(self._device, torch.tensor(numbers, dtype=torch.int64))
