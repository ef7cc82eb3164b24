"""Pinned host memory that holds residuals of the target exact in the packed form.

The link moves half of the bytes of raw residuals in bf16, and the device packs and unpacks. Rows of
pages have one size, with room for V of one of RECORDS_A_SPARE records that do not fit. V of more
records of a page lies in ordinary host memory, so that no page is refused, whatever its values.

Which records do not fit is known once a page was packed. The CPU asks before the page loses its
cache slot: until then the page is *doubtful*.

Packed records come into one of two buffers while the records of the other one are unpacked, also
those of the fetch before, so that the link does not wait for kernels.

Pages are packed with their anchors: those of the KV cache, or of rows beside the packed records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import TypeVar

import torch

from kvspec_kernels.ops.attention_plan import Backend
from sglang_kvspec.codecs.packed_residual import PackedResidual
from sglang_kvspec.kv.copy_streams import CopyStream, Event
from sglang_kvspec.kv.packed_anchors import PackedAnchors, PooledAnchors, StoredAnchors
from sglang_kvspec.kv.packed_pages import PackedPages
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.transfers import send_into, sent_together, to_device
from sglang_kvspec.planning.record_bytes import spare_rows

T = TypeVar("T")

# Raw bytes that are packed or unpacked at once.
AT_ONCE_BYTES = 64 << 20


def work_bytes(raw_page_bytes: int) -> int:
    """Return the device memory that this takes: in each of two streams raw residuals, their anchors
    and packed records, and V of those that do not fit, together less than 2.6 times AT_ONCE_BYTES
    or a page; and in the stream of fetches two buffers, which may have anchors, and V, together
    less than 2.7 times."""
    return 8 * max(AT_ONCE_BYTES, raw_page_bytes)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Pages on their way to the cache, on the device. slots, pages: [N] int64. numbers: int64 from
    0 on, of as many pages as come at once. ranks: [N, num_layers, num_kv_heads] int32, the row of
    raw_v of each record that does not fit, counted from 1."""

    slots: torch.Tensor
    pages: torch.Tensor
    numbers: torch.Tensor
    ranks: torch.Tensor
    raw_v: torch.Tensor


class PackedStore:
    """HostStore of packed records."""

    def __init__(
        self,
        cache: RecordPool,
        anchors: Callable[[], RecordPool] | None,
        packed: PackedResidual,
        num_rows: int,
        link: CopyStream,
        *,
        pinned: bool,
        kernels: Backend = "auto",
    ) -> None:
        """cache: by page. anchors: returns the pool of all pages' anchors, which are there when a
        page is written or read. None if the KV cache lacks some: `kernels` then encode anchors
        anew, in rows of their own. num_rows: row 0 and one for each page. link: a stream of its
        own, for copies to the device."""
        self._cache, self._packed = cache, packed
        layers, heads = cache.page_shape[:2]
        self._num_records = layers * heads
        self._num_spare = spare_rows(self._num_records)
        cpu = torch.device("cpu")
        self._records, self._spare = (
            RecordPool(num_layers, num_rows, num_heads, num_bytes, cpu, pinned=pinned, by_page=True)
            for num_layers, num_heads, num_bytes in (
                (layers, heads, packed.record_bytes),
                (1, self._num_spare, packed.raw_v_bytes),
            )
        )
        # Whole pages, and layers of pages, that are packed or unpacked at once.
        self._most_pages, self._most_layers = (
            max(1, min(AT_ONCE_BYTES // raw.nbytes, num_rows))
            for raw in (cache.page(0), cache.layer(0)[0])
        )
        self._anchors: PackedAnchors
        if anchors is not None:
            self._anchors = PooledAnchors(anchors, packed, cache)
        else:
            self._anchors = StoredAnchors(
                packed, cache, num_rows, self._most_pages, pinned=pinned, kernels=kernels
            )
        page = self._records.page(0)
        buffer_bytes = max(self._most_pages * page.nbytes, self._most_layers * page[0].nbytes)
        self._link = link
        self._buffers = torch.empty((2, buffer_bytes), dtype=torch.uint8, device=self._device)
        # By buffer: the point after which it may be written.
        self._unpacked: list[Event | None] = [None, None]
        # Number of the buffer that was given last.
        self._buffer = 1
        self._doubtful: set[int] = set()
        # By page with such records: which do not fit, and V of those that exceed its row.
        self._unfit: dict[int, list[int]] = {}
        self._more_v: dict[int, torch.Tensor] = {}

    @property
    def num_unfit(self) -> int:
        """Records of the settled pages that do not fit."""
        return sum(map(len, self._unfit.values()))

    def link_bytes(self, pages: Sequence[int]) -> int:
        num_unfit = sum(map(self._num_unfit, pages))
        of_page = self._num_records * self._packed.record_bytes + self._anchors.page_bytes
        return len(pages) * of_page + num_unfit * self._packed.raw_v_bytes

    # To the store

    def put(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        for pairs in self._at_once(zip(pages, slots, strict=True)):
            self._put(stream, *zip(*pairs, strict=True))
        self._doubtful.update(pages)

    def _put(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        with stream.current():
            raw = self._cache.read_pages(self._index(slots))
            anchors = self._anchors.of(pages, raw)
            parts = self._pack(anchors, raw)
        for pool, part in zip((self._records, self._spare), parts, strict=True):
            stream.copy_pages(pool.pages, pages, part, range(len(pages)))
        self._anchors.put(stream, pages, anchors)

    def _pack(self, anchors: torch.Tensor, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of both pools for anchors and raw residuals of pages on the device."""
        records, fits = self._packed.pack_records(anchors.flatten(1, 2), raw.flatten(1, 2))
        # The first records that do not fit, in their order. Behind them, any others.
        first = fits.to(torch.uint8).argsort(dim=1, stable=True)[:, : self._num_spare]
        page = torch.arange(len(raw), device=first.device)[:, None]
        spare = self._packed.v_of(raw.flatten(1, 2))[page, first]
        return records.view(len(raw), *self._records.page_shape), spare[:, None]

    def doubtful(self, pages: Iterable[int]) -> list[int]:
        return [page for page in pages if page in self._doubtful]

    def settle(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        if not pages:
            return
        self._doubtful.difference_update(pages)
        with stream.current():
            for page, slot, unfit in zip(pages, slots, self._unfit_in(pages), strict=True):
                if more := self._note_unfit(page, unfit):
                    self._more_v[page] = self._v_in(self._cache.page(slot), more)

    def _unfit_in(self, pages: Sequence[int]) -> list[list[int]]:
        """Return the numbers of the records that do not fit, for each of some written rows."""
        heads = self._records.pages[..., :2][torch.tensor(pages, dtype=torch.int64)]
        found: list[list[int]] = [[] for _ in pages]
        for row, record in (~self._packed.fits(heads)).flatten(1).nonzero().tolist():
            found[row].append(record)
        return found

    def _note_unfit(self, page: int, unfit: list[int]) -> list[int]:
        """Note which records do not fit. Return those whose V the page's row has no room for."""
        if unfit:
            self._unfit[page] = unfit
        return unfit[self._num_spare :]

    def _v_in(self, raw: torch.Tensor, records: list[int]) -> torch.Tensor:
        """Return V of these records, on the CPU. raw: raw residuals of a page."""
        index = to_device(raw.device, torch.tensor(records))
        return self._packed.v_of(raw.flatten(0, 1))[index].cpu()

    def forget(self, page: int) -> None:
        self._doubtful.discard(page)
        self._unfit.pop(page, None)
        self._more_v.pop(page, None)

    def write(self, pages: Sequence[int], records: torch.Tensor) -> None:
        self._check_landing()
        for some in self._at_once(range(len(pages))):
            part, ids = records[some[0] : some[-1] + 1], [pages[i] for i in some]
            raw = to_device(self._device, part)
            rows = self._pack(self._anchors.of(ids, raw), raw)
            for pool, row in zip((self._records, self._spare), rows, strict=True):
                pool.write_pages(torch.tensor(ids), row.cpu())
            for page, unfit, residual in zip(ids, self._unfit_in(ids), part, strict=True):
                self.forget(page)
                if more := self._note_unfit(page, unfit):
                    self._more_v[page] = self._v_in(residual, more)

    def write_packed(self, pages: Sequence[int], packed: torch.Tensor, raw_v: torch.Tensor) -> None:
        """Store pages in the packed form. packed, raw_v: as in PackedPages, records and raw_v."""
        self._check_landing()
        self._records.write_pages(torch.tensor(pages, dtype=torch.int64), packed)
        found = self._unfit_in(pages)
        counts = list(map(len, found))
        # Foreign pages may say that they miss more rows than there are: zeros then.
        raw_v = torch.nn.functional.pad(raw_v, (0, 0, 0, max(sum(counts) - len(raw_v), 0)))
        for page, unfit, rows in zip(
            pages, found, raw_v[: sum(counts)].split_with_sizes(counts), strict=True
        ):
            self.forget(page)
            kept = rows[: self._num_spare]
            self._spare.page(page)[0, : len(kept)] = kept
            if self._note_unfit(page, unfit):
                self._more_v[page] = rows[self._num_spare :].clone()

    # From the store

    def get(self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]) -> None:
        # The CPU has waited until rows of settled pages were written, so the link need not.
        self._check_settled(pages)
        if self._has_much_v(pages) and len(pages) > self._most_pages:
            for pairs in self._at_once(zip(slots, pages, strict=True)):
                self.get(stream, *zip(*pairs, strict=True))
            return
        fetch = self._begin(stream, slots, pages)
        for begin in range(0, len(pages), self._most_pages):
            some = slice(begin, begin + self._most_pages)
            ids = pages[some]
            records = self._next_buffer((len(ids), *self._records.page_shape))
            self._link.copy_pages(records, range(len(ids)), self._records.pages, ids)
            self._anchors.bring(self._link, self._buffer, ids)
            self._unpack(stream, fetch, some, records)

    def get_by_layer(
        self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]
    ) -> Iterator[None]:
        num_layers, step = self._cache.num_layers, self._most_layers
        if self._has_much_v(pages) or not self._anchors.comes_by_layer:
            self.get(stream, slots, pages)
            yield from (None for _ in range(num_layers))
            return
        self._check_settled(pages)
        fetch = self._begin(stream, slots, pages)
        # The link reads numbers of rows that were sent on `stream`.
        self._link.wait(stream.mark())
        for layer in range(num_layers):
            for begin in range(0, len(pages), step):
                some = slice(begin, begin + step)
                ids = fetch.pages[some]
                records = self._next_buffer((len(ids), *self._records.page_shape[1:]))
                rows = self._records.layer(layer)
                self._link.copy_rows(records, fetch.numbers[: len(ids)], rows, ids)
                self._unpack(stream, fetch, some, records[:, None], layer)
            yield

    def _begin(self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]) -> _Fetch:
        """Send what a fetch needs besides packed records, on `stream`, past the link's copies."""
        places = [
            row * self._num_records + record
            for row, page in enumerate(pages)
            for record in self._unfit.get(page, ())
        ]
        sources, targets, more = self._places_of_v(pages)
        numbers = (
            *(torch.tensor(ids, dtype=torch.int64) for ids in (slots, pages, places)),
            *(torch.tensor(ids, dtype=torch.int64) for ids in (sources, targets)),
            torch.arange(min(max(self._most_pages, self._most_layers), len(pages))),
            torch.arange(1, len(places) + 1, dtype=torch.int32),
        )
        shape = (len(places), self._packed.raw_v_bytes)
        with stream.current():
            to, of, there, *spare, count, found = sent_together(self._device, numbers)
            # Few records have a rank: the link need not carry zeros.
            ranks = found.new_zeros(len(pages) * self._num_records)
            if places:
                ranks.index_copy_(0, there, found)
            ranks = ranks.view(len(pages), *self._cache.page_shape[:2])
            raw_v = torch.empty(shape, dtype=torch.uint8, device=self._device)
            send_into([(raw_v[rows], self._more_v[page]) for page, rows in more.items()])
        if sources:
            stream.copy_rows(raw_v, spare[1], self._spare.pages.flatten(0, 2), spare[0])
        return _Fetch(to, of, count, ranks, raw_v)

    def _places_of_v(self, pages: Sequence[int]) -> tuple[list[int], list[int], dict[int, slice]]:
        """Return where V of the records that do not fit lies, in the order of these pages: rows of
        all pages' spare rows, their numbers among all V, and by page the numbers of more V."""
        sources: list[int] = []
        targets: list[int] = []
        more: dict[int, slice] = {}
        begin = 0
        for page in pages:
            count = self._num_unfit(page)
            spare = min(count, self._num_spare)
            targets += range(begin, begin + spare)
            sources += range(page * self._num_spare, page * self._num_spare + spare)
            if count > spare:
                more[page] = slice(begin + spare, begin + count)
            begin += count
        return sources, targets, more

    def _next_buffer(self, shape: Sequence[int]) -> torch.Tensor:
        """Return the other buffer in this shape, for work that the link is given after this
        call."""
        self._buffer = 1 - self._buffer
        if (event := self._unpacked[self._buffer]) is not None:
            self._link.wait(event)
        return self._buffers[self._buffer, : prod(shape)].view(*shape)

    def _unpack(
        self,
        stream: CopyStream,
        fetch: _Fetch,
        some: slice,
        records: torch.Tensor,
        first_layer: int = 0,
    ) -> None:
        """Unpack records of some pages and layers, which the link has written to the buffer given
        last, into the cache."""
        stream.wait(self._link.mark())
        with stream.current():
            pages = fetch.pages[some]
            self._anchors.unpack(self._buffer)(
                fetch.slots[some],
                self._anchors.rows(pages, fetch.numbers[: len(pages)]),
                records,
                fetch.raw_v,
                fetch.ranks[some],
                first_layer,
            )
        self._unpacked[self._buffer] = stream.mark()

    def _has_much_v(self, pages: Sequence[int]) -> bool:
        """Return True if V of the records that do not fit takes more memory than is kept for V on
        its way."""
        return sum(map(self._num_unfit, pages)) * self._packed.raw_v_bytes > AT_ONCE_BYTES // 4

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        parts = [torch.empty((0, *self._cache.page_shape), dtype=torch.uint8)]
        for some in self._at_once(pages):
            packed = self.read_packed(some)
            records, raw_v = (
                to_device(self._device, part) for part in (packed.records, packed.raw_v)
            )
            raw = self._packed.unpack(
                self._anchors.read(some).flatten(1, 2), records.flatten(1, 2), raw_v
            )
            parts.append(raw.view(len(some), *self._cache.page_shape).cpu())
            # The next pages need this memory.
            del raw, records, raw_v
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

    def _check_landing(self) -> None:
        assert not self._anchors.page_bytes, "pages land only where the KV cache has all anchors"

    def _num_unfit(self, page: int) -> int:
        return len(self._unfit.get(page, ()))

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

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(self._device, torch.tensor(numbers, dtype=torch.int64))
