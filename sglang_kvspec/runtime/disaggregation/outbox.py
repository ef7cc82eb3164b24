"""Outbox of pages that wait for a link: some in host memory, the rest in the KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from sglang_kvspec.core.errors import CodecError
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import SegmentKey, Stream

# Most bytes of packed pages that wait for the link, in each stream. Each request may have one
# portion beyond that, so that it does not wait for receivers of other requests. Torch pins memory
# by powers of two, so that on a GPU server this may take twice as much.
READY_BYTES = 256 << 20
# Portions in READY_BYTES. Pages of a portion are packed together, because each packing waits for
# the device. Larger portions would keep the link waiting for the first page.
PORTIONS = 16


@dataclass(slots=True, eq=False)
class _Waiting:
    """Pages of one request that are not packed yet. index: index of the first of them in the
    request. num_parts: parts that each page is sent in."""

    room: int
    index: int
    pages: list[int]
    num_parts: int


@dataclass(slots=True)
class _Portion:
    """Bytes of pages that were packed together, which count until all their parts are released."""

    num_bytes: int
    num_left: int


class Outbox:
    """Pages of all requests that wait for a link, owned by the owner of the KV cache. Streams do
    not wait for each other; each packs pages in the order in which they were added. Added pages
    must stay unchanged in the KV cache until they are packed, or their room is dropped."""

    def __init__(
        self,
        wire: PageWire,
        offer: Callable[[SegmentKey, torch.Tensor], None],
        ready_bytes: int = READY_BYTES,
    ) -> None:
        """offer: hands one part of a packed page to the link. Each part must be passed to
        released() later."""
        self._wire, self._offer, self._ready_bytes = wire, offer, ready_bytes
        sizes = {Stream.ANCHOR: wire.anchor_bytes, Stream.RESIDUAL: wire.residual_bytes}
        # Streams in use, with the most bytes of a page.
        self._page_bytes = {stream: size for stream, size in sizes.items() if size}
        self._waiting: dict[Stream, list[_Waiting]] = {stream: [] for stream in self._page_bytes}
        self._portions: dict[SegmentKey, _Portion] = {}
        self._num_ready = dict.fromkeys(self._page_bytes, 0)
        # Numbers of packed parts that are not released, by request and stream.
        self._ready_parts: Counter[tuple[int, Stream]] = Counter()

    @property
    def num_ready_bytes(self) -> int:
        """Bytes of host memory that packed pages take."""
        return sum(self._num_ready.values())

    def add(self, room: int, index: int, pages: Sequence[int], num_parts: int = 1) -> None:
        """Add a request's pages from `index` on, each to be sent in num_parts parts."""
        if pages:
            for waiting in self._waiting.values():
                waiting.append(_Waiting(room, index, list(pages), num_parts))

    def released(self, key: SegmentKey) -> None:
        """Free a part of a page, which the link does not need any more. Other keys are ignored."""
        portion = self._portions.pop(key, None)
        if portion is not None:
            portion.num_left -= 1
            self._ready_parts[key.transfer, key.stream] -= 1
            if not self._ready_parts[key.transfer, key.stream]:
                del self._ready_parts[key.transfer, key.stream]
            if not portion.num_left:
                self._num_ready[key.stream] -= portion.num_bytes

    def pack(self, streams: Iterable[Stream] = Stream) -> dict[int, str]:
        """Pack pages of these streams while there is room. Returns the rooms with a page that the
        wire cannot carry, and why; they are dropped."""
        spoiled: dict[int, str] = {}
        for stream in streams:
            for waiting in list(self._waiting.get(stream, ())):
                try:
                    self._pack_what_fits(stream, waiting)
                except CodecError as error:
                    spoiled[waiting.room] = str(error)
                    self.drop(waiting.room)
        return spoiled

    def _pack_what_fits(self, stream: Stream, waiting: _Waiting) -> None:
        # The request may have been dropped since pack() listed it.
        while waiting in self._waiting[stream]:
            count = self._room_for(stream, waiting)
            if not count:
                return
            self._pack(stream, waiting, count)
            if not waiting.pages and waiting in self._waiting[stream]:
                self._waiting[stream].remove(waiting)

    def _room_for(self, stream: Stream, waiting: _Waiting) -> int:
        """Return the number of pages to pack next: a portion, or the rest; 0 without room."""
        page_bytes = self._page_bytes[stream]
        portion = max(1, self._ready_bytes // PORTIONS // page_bytes)
        count = min(len(waiting.pages), portion)
        fits = self._num_ready[stream] + count * page_bytes <= self._ready_bytes
        return count if fits or not self._ready_parts[waiting.room, stream] else 0

    def _pack(self, stream: Stream, waiting: _Waiting, count: int) -> None:
        payloads = self._wire.pack(stream, waiting.pages[:count], waiting.num_parts)
        if waiting not in self._waiting[stream]:
            # Packing may collect garbage, and a sender that is collected drops its pages.
            return
        keyed = {
            SegmentKey(waiting.room, stream, index, chunk): part
            for index, parts in enumerate(payloads, waiting.index)
            for chunk, part in enumerate(parts)
        }
        portion = _Portion(sum(part.nbytes for part in keyed.values()), len(keyed))
        self._num_ready[stream] += portion.num_bytes
        for key, part in keyed.items():
            self._portions[key] = portion
            self._ready_parts[waiting.room, stream] += 1
            self._offer(key, part)
        waiting.index += count
        del waiting.pages[:count]

    def drop(self, room: int) -> None:
        """Remove the pages of a request that are not packed yet."""
        for waiting in self._waiting.values():
            waiting[:] = [entry for entry in waiting if entry.room != room]

    def rooms_of(self, pages: Iterable[int]) -> set[int]:
        """Return the requests that have yet to pack some of these pages."""
        gone = set(pages)
        return {
            entry.room
            for waiting in self._waiting.values()
            for entry in waiting
            if not gone.isdisjoint(entry.pages)
        }
