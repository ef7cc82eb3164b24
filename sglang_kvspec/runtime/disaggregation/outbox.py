"""Pages that wait for a link: host memory for some of them, the KV cache for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from sglang_kvspec.core.errors import CodecError
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import SegmentKey, Stream

# Of packed pages that the link has not taken, in each stream. Torch pins memory by powers of two,
# so that beside a GPU this may take twice as much.
READY_BYTES = 256 << 20
# Pages are packed together, of which each time costs a wait for the device: so many of them, and so
# few that the link does not wait long for the first.
PORTIONS = 16


@dataclass(slots=True)
class _Waiting:
    """pages: those not packed yet, the first of which is the request's page `index`."""

    room: int
    index: int
    pages: list[int]


@dataclass(slots=True)
class _Portion:
    """Packed together, and one piece of memory until all of it has been released."""

    num_bytes: int
    num_left: int


class Outbox:
    """Owned by whoever owns the KV cache. Streams do not wait for each other, and a request's pages
    are packed in the order in which they were added. What is added must stay as it is in the KV
    cache, until its room is dropped at the latest."""

    def __init__(
        self,
        wire: PageWire,
        offer: Callable[[SegmentKey, torch.Tensor], None],
        ready_bytes: int = READY_BYTES,
    ) -> None:
        """offer: hands a packed page to the link; released() follows for each."""
        self._wire, self._offer, self._ready_bytes = wire, offer, ready_bytes
        sizes = {Stream.ANCHOR: wire.anchor_bytes, Stream.RESIDUAL: wire.residual_bytes}
        # Streams that there are, with the most that a page of them takes.
        self._page_bytes = {stream: size for stream, size in sizes.items() if size}
        self._waiting: dict[Stream, list[_Waiting]] = {stream: [] for stream in self._page_bytes}
        self._portions: dict[SegmentKey, _Portion] = {}
        self._num_ready = dict.fromkeys(self._page_bytes, 0)

    @property
    def num_ready_bytes(self) -> int:
        """Of host memory."""
        return sum(self._num_ready.values())

    def add(self, room: int, index: int, pages: Sequence[int]) -> None:
        """A request's pages from `index` on are to be sent."""
        if pages:
            for waiting in self._waiting.values():
                waiting.append(_Waiting(room, index, list(pages)))

    def released(self, key: SegmentKey) -> None:
        """The link needs a page no more. Nothing happens for what was not packed here."""
        portion = self._portions.pop(key, None)
        if portion is not None:
            portion.num_left -= 1
            if not portion.num_left:
                self._num_ready[key.stream] -= portion.num_bytes

    def pack(self, streams: Iterable[Stream] = Stream) -> dict[int, str]:
        """Pack what there is room for in these streams. Returns rooms of which a page cannot be
        carried, and why; they are dropped."""
        spoiled: dict[int, str] = {}
        for stream in streams:
            waiting = self._waiting.get(stream, [])
            while waiting:
                first = waiting[0]
                count = self._room_for(stream, len(first.pages))
                if not count:
                    break
                try:
                    self._pack(stream, first, count)
                except CodecError as error:
                    spoiled[first.room] = str(error)
                    self.drop(first.room)
                if waiting and not waiting[0].pages:
                    waiting.pop(0)
        return spoiled

    def _room_for(self, stream: Stream, num_pages: int) -> int:
        """Of so many pages, those to be packed now: at least a portion, or all."""
        page_bytes, num_ready = self._page_bytes[stream], self._num_ready[stream]
        portion = max(1, self._ready_bytes // PORTIONS // page_bytes)
        count = min(num_pages, portion)
        fits = num_ready + count * page_bytes <= self._ready_bytes
        # However large a page is, one can be sent.
        return count if fits or not num_ready else 0

    def _pack(self, stream: Stream, waiting: _Waiting, count: int) -> None:
        payloads = self._wire.pack(stream, waiting.pages[:count])
        portion = _Portion(sum(payload.nbytes for payload in payloads), count)
        self._num_ready[stream] += portion.num_bytes
        for place, payload in enumerate(payloads):
            key = SegmentKey(waiting.room, stream, waiting.index + place, 0)
            self._portions[key] = portion
            self._offer(key, payload)
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
