"""Where arriving bytes go: into the memory of pages that expect them, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.frames import Data, Stream
from sglang_kvspec.transport.ranges import ByteRanges
from sglang_kvspec.transport.segments import TransferShape
from sglang_kvspec.transport.wire import Buffer, Drop, FrameError

# A sender cuts a chunk in order; this many holes in one come from nothing that means well.
MAX_HOLES = 256
# Completed transfers whose late frames are known for duplicates.
NUM_REMEMBERED = 4096


class Destination(Protocol):
    """Memory that pages arrive in."""

    def view(self, stream: Stream, page: int, generation: int, chunk: int) -> memoryview | None:
        """The bytes of a chunk, writable; None if the page is of another generation by now."""
        ...


@dataclass(frozen=True, slots=True)
class PageArrived:
    """All chunks of a page's stream have arrived."""

    transfer: int
    stream: Stream
    page_index: int


@dataclass(frozen=True, slots=True)
class StreamArrived:
    """All pages of a stream have arrived, after_s after they were expected."""

    transfer: int
    stream: Stream
    after_s: float


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer is over; no byte of it will be written any more."""

    transfer: int
    reason: str


Arrival = PageArrived | StreamArrived | TransferFailed


class IncomingState(Enum):
    """EMPTY: anchors are missing. DRAFTABLE: all anchors are there. COMPLETE: residuals too."""

    EMPTY = 0
    DRAFTABLE = 1
    COMPLETE = 2


class Incoming:
    """A transfer as its receiver sees it."""

    def __init__(
        self,
        transfer: int,
        shape: TransferShape,
        pages: Sequence[tuple[int, int]],
        destination: Destination,
        now_s: float,
    ) -> None:
        self.transfer = transfer
        self.shape = shape
        self.pages = tuple(pages)
        self.destination = destination
        self.started_s = now_s
        self.missing = [shape.num_segments(stream) for stream in Stream]
        self._chunks_left = {
            (stream, index): shape.num_chunks for stream in Stream for index in range(len(pages))
        }
        self._index = {page: index for index, (page, _) in enumerate(pages)}
        self._partial: dict[tuple[Stream, int, int], ByteRanges] = {}
        self._full: set[tuple[Stream, int, int]] = set()
        if len(pages) != shape.num_pages or len(self._index) != len(pages):
            raise TransportError(f"transfer {transfer}: {len(pages)} pages, or one twice: {shape}")

    @property
    def state(self) -> IncomingState:
        if self.missing[Stream.ANCHOR]:
            return IncomingState.EMPTY
        return IncomingState.DRAFTABLE if self.missing[Stream.RESIDUAL] else IncomingState.COMPLETE

    def write(self, frame: Data, payload: Buffer) -> tuple[int, int | None]:
        """Copy what is new of a piece. Returns its bytes, and the page's index where that page's
        stream is now complete. Raises FrameError, and has written nothing, for a wrong place."""
        index = self._index.get(frame.page)
        size = self.shape.chunk_bytes(frame.stream)
        if index is None or frame.chunk >= self.shape.num_chunks:
            raise FrameError(Drop.MISPLACED, f"page {frame.page}, chunk {frame.chunk}")
        stop = frame.offset + frame.length
        if stop > size:
            raise FrameError(Drop.MISPLACED, f"bytes up to {stop} of {size}")
        if frame.generation != self.pages[index][1]:
            raise FrameError(Drop.STALE, f"page {frame.page}, generation {frame.generation}")
        key = (frame.stream, index, frame.chunk)
        if key in self._full:
            return 0, None
        target = self.destination.view(frame.stream, frame.page, frame.generation, frame.chunk)
        if target is None:
            raise FrameError(Drop.RECYCLED, f"page {frame.page} has been recycled")
        return self._cover(key, frame.offset, stop, target, memoryview(payload))

    def _cover(
        self,
        key: tuple[Stream, int, int],
        start: int,
        stop: int,
        target: memoryview,
        payload: memoryview,
    ) -> tuple[int, int | None]:
        size = self.shape.chunk_bytes(key[0])
        if len(target) != size:
            raise TransportError(f"{key}: destination of {len(target)} bytes, expected {size}")
        ranges = self._partial.setdefault(key, ByteRanges(size))
        if len(ranges) >= MAX_HOLES:
            raise FrameError(Drop.MISPLACED, f"{key} has {len(ranges)} holes")
        num_new = 0
        for a, b in ranges.add(start, stop):
            target[a:b] = payload[a - start : b - start]
            num_new += b - a
        if not ranges.is_full:
            return num_new, None
        del self._partial[key]
        self._full.add(key)
        self.missing[key[0]] -= 1
        page = key[:2]
        self._chunks_left[page] -= 1
        return num_new, None if self._chunks_left[page] else key[1]


class Arrivals:
    """All transfers that one link's receiver expects."""

    def __init__(self, counters: LinkCounters) -> None:
        self.counters = counters
        self.incoming: dict[int, Incoming] = {}
        self._events: list[Arrival] = []
        # An acknowledgement may be lost with its connection; then the sender sends again.
        self._completed: dict[int, None] = {}

    def expect(self, incoming: Incoming) -> None:
        if incoming.transfer in self.incoming:
            raise TransportError(f"transfer {incoming.transfer} is expected already")
        self.incoming[incoming.transfer] = incoming

    def write(self, frame: Data, payload: Buffer, now_s: float) -> bool:
        """Returns whether anything was new. Raises FrameError for a frame to drop."""
        incoming = self.incoming.get(frame.transfer)
        if incoming is None and frame.transfer in self._completed:
            self.counters.streams[frame.stream].duplicate_bytes += frame.length
            return False
        if incoming is None:
            raise FrameError(Drop.UNKNOWN, f"transfer {frame.transfer}")
        num_new, page = incoming.write(frame, payload)
        stream = self.counters.streams[frame.stream]
        stream.frames += 1
        stream.payload_bytes += num_new
        stream.duplicate_bytes += frame.length - num_new
        if page is not None:
            self._events.append(PageArrived(frame.transfer, frame.stream, page))
        if num_new and not incoming.missing[frame.stream]:
            self._stream_arrived(incoming, frame.stream, now_s)
        if incoming.state is IncomingState.COMPLETE:
            self._complete(frame.transfer)
        return num_new > 0

    def fail(self, transfer: int, reason: str) -> None:
        """Give a transfer up; nothing happens where it is over."""
        if self.incoming.pop(transfer, None) is not None:
            self.counters.failed += 1
            self._events.append(TransferFailed(transfer, reason))

    def take_events(self) -> list[Arrival]:
        events, self._events = self._events, []
        return events

    def _complete(self, transfer: int) -> None:
        del self.incoming[transfer]
        self.counters.completed += 1
        self._completed[transfer] = None
        while len(self._completed) > NUM_REMEMBERED:
            del self._completed[next(iter(self._completed))]

    def _stream_arrived(self, incoming: Incoming, stream: Stream, now_s: float) -> None:
        after_s = now_s - incoming.started_s
        durations = (self.counters.to_anchors, self.counters.to_residuals)
        durations[stream].observe(after_s)
        self._events.append(StreamArrived(incoming.transfer, stream, after_s))
