"""Incoming transfers: each arriving byte is written once, into the page that expects it."""

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

# A sender cuts a chunk in order: only a broken or hostile one leaves this many holes.
MAX_HOLES = 256
# Ended transfers that are remembered, so that their late frames are recognized.
NUM_REMEMBERED = 4096

# (stream, page index, chunk)
_Place = tuple[Stream, int, int]


class Destination(Protocol):
    """Memory that pages arrive in."""

    def view(self, stream: Stream, page: int, generation: int, chunk: int) -> memoryview | None:
        """Return writable memory for the largest chunk of the stream; a shorter chunk fills its
        first bytes. None if the page has another generation."""
        ...


@dataclass(frozen=True, slots=True)
class PageArrived:
    """Event: all chunks of a page's stream have arrived. chunk_bytes: size of each."""

    transfer: int
    stream: Stream
    page_index: int
    chunk_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class StreamArrived:
    """Event: all pages of a stream have arrived. after_s: seconds since expect()."""

    transfer: int
    stream: Stream
    after_s: float


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Event: the transfer has failed. No byte of it will be written from now on."""

    transfer: int
    reason: str


Arrival = PageArrived | StreamArrived | TransferFailed


class IncomingState(Enum):
    """EMPTY: anchors are missing. DRAFTABLE: all anchors are here. COMPLETE: residuals, too."""

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
            (stream, index): shape.num_chunks
            for stream in Stream
            for index in range(shape.num_pages_of(stream))
        }
        self._index = {page: index for index, (page, _) in enumerate(pages)}
        self._partial: dict[_Place, ByteRanges] = {}
        # Chunks that have arrived, with their sizes in bytes.
        self._full: dict[_Place, int] = {}
        if len(pages) != shape.num_pages or len(self._index) != len(pages):
            raise TransportError(
                f"transfer {transfer} needs {shape.num_pages} distinct pages, got {len(pages)}, "
                f"{len(self._index)} distinct: {shape}"
            )

    @property
    def state(self) -> IncomingState:
        if self.missing[Stream.ANCHOR]:
            return IncomingState.EMPTY
        return IncomingState.DRAFTABLE if self.missing[Stream.RESIDUAL] else IncomingState.COMPLETE

    def write(self, frame: Data, payload: Buffer) -> tuple[int, PageArrived | None]:
        """Copy the new bytes of a piece. Return their number, and the event if a page's stream is
        complete. Raises FrameError for a wrong place, before anything is written."""
        key = self._place(frame)
        if key in self._full:
            return 0, None
        target = self.destination.view(frame.stream, frame.page, frame.generation, frame.chunk)
        if target is None:
            raise FrameError(Drop.RECYCLED, f"page {frame.page} has been recycled")
        if len(target) < frame.size:
            raise FrameError(Drop.NO_ROOM, f"{key} has {frame.size} bytes, its place {len(target)}")
        if (ranges := self._partial.get(key)) is None:
            ranges = self._partial[key] = ByteRanges(frame.size)
        if len(ranges) >= MAX_HOLES:
            raise FrameError(Drop.MISPLACED, f"{key} has {len(ranges)} holes, the limit")
        num_new, source = 0, memoryview(payload)
        for start, stop in ranges.add(frame.offset, frame.offset + frame.length):
            target[start:stop] = source[start - frame.offset : stop - frame.offset]
            num_new += stop - start
        return num_new, self._fill(key) if ranges.is_full else None

    def _place(self, frame: Data) -> _Place:
        """Check every field of a frame. Return the chunk of its piece, or raise FrameError."""
        index = self._index.get(frame.page)
        if (
            index is None
            or index >= self.shape.num_pages_of(frame.stream)
            or frame.chunk >= self.shape.num_chunks
        ):
            raise FrameError(
                Drop.MISPLACED,
                f"there is no {frame.stream.name} chunk {frame.chunk} of page {frame.page}",
            )
        if frame.generation != (expected := self.pages[index][1]):
            detail = f"page {frame.page} has generation {expected}, the frame {frame.generation}"
            raise FrameError(Drop.STALE, detail)
        key = (frame.stream, index, frame.chunk)
        stop, limit = frame.offset + frame.length, self.shape.chunk_bytes(frame.stream)
        if not stop <= frame.size <= limit:
            raise FrameError(
                Drop.MISPLACED, f"{key}: piece ends at {stop} of {frame.size} bytes, limit {limit}"
            )
        partial = self._partial.get(key)
        known = self._full.get(key) if partial is None else partial.size
        if known not in (None, frame.size):
            raise FrameError(
                Drop.MISPLACED, f"{key} has {known} bytes, the frame says {frame.size}"
            )
        return key

    def _fill(self, key: _Place) -> PageArrived | None:
        """Record that a chunk has arrived. Return the event if its page's stream is complete."""
        stream, index, _ = key
        self._full[key] = self._partial.pop(key).size
        self.missing[stream] -= 1
        self._chunks_left[stream, index] -= 1
        if self._chunks_left[stream, index]:
            return None
        chunks = range(self.shape.num_chunks)
        sizes = tuple(self._full[stream, index, chunk] for chunk in chunks)
        return PageArrived(self.transfer, stream, index, sizes)


class Arrivals:
    """All transfers that one link's receiver expects."""

    def __init__(self, counters: LinkCounters) -> None:
        self.counters = counters
        self.incoming: dict[int, Incoming] = {}
        self._events: list[Arrival] = []
        # Why a transfer failed; None if it is complete. An Ack or an Abort may be lost with its
        # connection, and the sender then sends again.
        self._over: dict[int, str | None] = {}

    def expect(self, incoming: Incoming) -> None:
        if incoming.transfer in self.incoming:
            raise TransportError(f"transfer {incoming.transfer} is already expected")
        self.incoming[incoming.transfer] = incoming

    def write(self, frame: Data, payload: Buffer, now_s: float) -> bool:
        """Write a piece. Return True if any byte was new. Raises FrameError for a frame to drop."""
        incoming = self.incoming.get(frame.transfer)
        if incoming is None and self._over.get(frame.transfer, "never heard of") is None:
            self.counters.streams[frame.stream].duplicate_bytes += frame.length
            return False
        if incoming is None:
            raise FrameError(Drop.UNKNOWN, f"transfer {frame.transfer} is unknown")
        num_new, page = incoming.write(frame, payload)
        stream = self.counters.streams[frame.stream]
        stream.frames += 1
        stream.payload_bytes += num_new
        stream.duplicate_bytes += frame.length - num_new
        if page is not None:
            self._events.append(page)
        if num_new and not incoming.missing[frame.stream]:
            self._stream_arrived(incoming, frame.stream, now_s)
        if incoming.state is IncomingState.COMPLETE:
            self._complete(frame.transfer)
        return num_new > 0

    def fail(self, transfer: int, reason: str) -> None:
        """Fail a transfer. Does nothing if the transfer is not expected."""
        if self.incoming.pop(transfer, None) is not None:
            self.counters.failed += 1
            self._remember(transfer, reason)
            self._events.append(TransferFailed(transfer, reason))

    def reason_of(self, transfer: int) -> str:
        """Return why bytes of a transfer are not wanted, to tell its sender."""
        reason = self._over.get(transfer)
        return "the receiver does not expect the transfer" if reason is None else reason

    def take_events(self) -> list[Arrival]:
        events, self._events = self._events, []
        return events

    def _complete(self, transfer: int) -> None:
        del self.incoming[transfer]
        self.counters.completed += 1
        self._remember(transfer, None)

    def _remember(self, transfer: int, reason: str | None) -> None:
        self._over[transfer] = reason
        while len(self._over) > NUM_REMEMBERED:
            del self._over[next(iter(self._over))]

    def _stream_arrived(self, incoming: Incoming, stream: Stream, now_s: float) -> None:
        after_s = now_s - incoming.started_s
        durations = (self.counters.to_anchors, self.counters.to_residuals)
        durations[stream].observe(after_s)
        self._events.append(StreamArrived(incoming.transfer, stream, after_s))
