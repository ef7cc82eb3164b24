"""Pages that wait for a link: host memory for some of them, the KV cache for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from sglang_kvspec.core.errors import CodecError
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import SegmentKey, Stream

# Of packed pages that the link has not taken, in each stream; beyond that a portion of each
# request, so that none waits for receivers of others. Torch pins memory by powers of two, so that
# beside a GPU this may take twice as much.
READY_BYTES = 256 << 20
# That READY_BYTES is: pages are packed together, of which each time costs a wait for the device: so
# many of them, and so few that the link does not wait long for the first.
PORTIONS = 16


@dataclass(slots=True, eq=False)
class _Waiting:
    """pages: those not packed yet, the first of which is the request's page `index`, and each of
    which is sent in num_parts parts."""

    room: int
    index: int
    pages: list[int]
    num_parts: int


@dataclass(slots=True)
class _Portion:
    """Packed together, and one piece of memory until all of it has been released."""

    num_bytes: int
    num_left: int


class Outbox:
    """Owned by whoever owns the KV cache. Streams do not wait for each other, and who came first is
    packed first. What is added must stay as it is in the KV cache, until its room is dropped at the
    latest."""

    def __init__(
        self,
        wire: PageWire,
        offer: Callable[[SegmentKey, torch.Tensor], None],
        ready_bytes: int = READY_BYTES,
    ) -> None:
        """offer: hands a packed page, or a part of it, to the link; released() follows for each."""
        self._wire, self._offer, self._ready_bytes = wire, offer, ready_bytes
        sizes = {Stream.ANCHOR: wire.anchor_bytes, Stream.RESIDUAL: wire.residual_bytes}
        # Streams that there are, with the most that a page of them takes.
        self._page_bytes = {stream: size for stream, size in sizes.items() if size}
        self._waiting: dict[Stream, list[_Waiting]] = {stream: [] for stream in self._page_bytes}
        self._portions: dict[SegmentKey, _Portion] = {}
        self._num_ready = dict.fromkeys(self._page_bytes, 0)
        # Parts of pages of each request and stream.
        self._ready_parts: Counter[tuple[int, Stream]] = Counter()

    @property
    def num_ready_bytes(self) -> int:
        """Of host memory."""
        return sum(self._num_ready.values())

    def add(self, room: int, index: int, pages: Sequence[int], num_parts: int = 1) -> None:
        """A request's pages from `index` on are to be sent, each in so many parts."""
        if pages:
            for waiting in self._waiting.values():
                waiting.append(_Waiting(room, index, list(pages), num_parts))

    def released(self, key: SegmentKey) -> None:
        """The link needs a part of a page no more. Nothing happens for what was not packed here."""
        portion = self._portions.pop(key, None)
        if portion is not None:
            portion.num_left -= 1
            self._ready_parts[key.transfer, key.stream] -= 1
            if not self._ready_parts[key.transfer, key.stream]:
                del self._ready_parts[key.transfer, key.stream]
            if not portion.num_left:
                self._num_ready[key.stream] -= portion.num_bytes

    def pack(self, streams: Iterable[Stream] = Stream) -> dict[int, str]:
        """Pack what there is room for in these streams. Returns rooms of which a page cannot be
        carried, and why; they are dropped."""
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
        # It may be of a request that was dropped a moment ago.
        while waiting in self._waiting[stream]:
            count = self._room_for(stream, waiting)
            if not count:
                return
            self._pack(stream, waiting, count)
            if not waiting.pages and waiting in self._waiting[stream]:
                self._waiting[stream].remove(waiting)

    def _room_for(self, stream: Stream, waiting: _Waiting) -> int:
        """Pages to be packed now: a portion, or the rest."""
        page_bytes = self._page_bytes[stream]
        portion = max(1, self._ready_bytes // PORTIONS // page_bytes)
        count = min(len(waiting.pages), portion)
        fits = self._num_ready[stream] + count * page_bytes <= self._ready_bytes
        return count if fits or not self._ready_parts[waiting.room, stream] else 0

    def _pack(self, stream: Stream, waiting: _Waiting, count: int) -> None:
        payloads = self._wire.pack(stream, waiting.pages[:count], waiting.num_parts)
        if waiting not in self._waiting[stream]:
            # Packing collects garbage, and with a sender that nobody holds its pages are dropped.
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
        """Pack no more of a request."""
        for waiting in self._waiting.values():
            waiting[:] = [entry for entry in waiting if entry.room != room]

    def rooms_of(self, pages: Iterable[int]) -> set[int]:
        """Requests of which some of these pages are still to be packed."""
        gone = set(pages)
        return {
            entry.room
            for waiting in self._waiting.values()
            for entry in waiting
            if not gone.isdisjoint(entry.pages)
        }
