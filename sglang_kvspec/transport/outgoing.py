"""One transfer as its sender sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.segments import Piece, Segment, SegmentKey, TransferShape

PageKey = tuple[int, int]


class Outgoing:
    """Segments of a transfer that were offered and are not delivered. Sending waits for the
    receiver's Open, which names peer, shape and pages. Offers may come before the Open."""

    def __init__(self, transfer: int) -> None:
        self.transfer = transfer
        self.peer: bytes | None = None
        self.shape: TransferShape | None = None
        self.pages: Sequence[PageKey] = ()
        # Time at which an offer last made each stream's queue non-empty.
        self.since_s = [0.0, 0.0]
        self.live: dict[SegmentKey, Segment] = {}
        self._offered: set[SegmentKey] = set()
        self._delivered = 0
        self._fresh: tuple[deque[Segment], deque[Segment]] = (deque(), deque())
        self._again: tuple[deque[Piece], deque[Piece]] = (deque(), deque())

    @property
    def is_offered(self) -> bool:
        """Return True if any segment of the transfer was ever offered."""
        return bool(self._offered)

    @property
    def is_delivered(self) -> bool:
        if self.shape is None:
            return False
        return self._delivered == sum(self.shape.num_segments(stream) for stream in Stream)

    def open(self, peer: bytes, shape: TransferShape, pages: Sequence[PageKey]) -> str | None:
        """Bind the transfer to a receiver. Return None, or why that is impossible."""
        if self.shape is not None:
            same = (self.peer, self.shape, self.pages) == (peer, shape, pages)
            if same:
                return None
            return "the transfer is already open to another receiver, or into other pages"
        for key, segment in self.live.items():
            if (wrong := _misfit(shape, key, len(segment.view))) is not None:
                return wrong
        self.peer, self.shape, self.pages = peer, shape, pages
        return None

    def offer(self, segment: Segment) -> None:
        key = segment.key
        if key in self._offered:
            raise TransportError(f"{key} was already offered")
        if not len(segment.view):
            raise TransportError(f"{key} has no bytes")
        if self.shape is not None and (wrong := _misfit(self.shape, key, len(segment.view))):
            raise TransportError(wrong)
        self._offered.add(key)
        self.live[key] = segment
        self._fresh[key.stream].append(segment)

    def waits(self, stream: Stream) -> bool:
        return bool(self._again[stream] or self._fresh[stream])

    def peek(self, stream: Stream) -> Piece:
        """Return the longest piece that could go next. Lost pieces go before new ones."""
        if self._again[stream]:
            return self._again[stream][0]
        segment = self._fresh[stream][0]
        return Piece(segment, segment.cut, len(segment.view) - segment.cut)

    def take(self, piece: Piece) -> bool:
        """Record that the head of peek()'s piece is sent. Return True if it was sent before."""
        again, fresh = self._again[piece.stream], self._fresh[piece.stream]
        if again:
            whole = again.popleft()
            assert (whole.segment, whole.offset) == (piece.segment, piece.offset)
            if piece.length < whole.length:
                rest = piece.offset + piece.length
                again.appendleft(Piece(whole.segment, rest, whole.length - piece.length))
            return True
        assert (fresh[0], fresh[0].cut) == (piece.segment, piece.offset)
        piece.segment.cut += piece.length
        if piece.segment.cut == len(piece.segment.view):
            fresh.popleft()
        return False

    def lose(self, pieces: Sequence[Piece]) -> None:
        """Queue lost pieces in their order, before all new ones."""
        for piece in reversed(pieces):
            self._again[piece.stream].appendleft(piece)

    def deliver(self, piece: Piece) -> bool:
        """Record that the peer has a piece. Return True if that completes its segment."""
        segment = piece.segment
        segment.undelivered -= piece.length
        assert segment.undelivered >= 0
        if segment.undelivered:
            return False
        self._delivered += 1
        del self.live[segment.key]
        return True


def _misfit(shape: TransferShape, key: SegmentKey, num_bytes: int) -> str | None:
    num_pages = shape.num_pages_of(key.stream)
    if not (0 <= key.page_index < num_pages and 0 <= key.chunk < shape.num_chunks):
        return f"{key} is outside {shape}"
    limit = shape.chunk_bytes(key.stream)
    return None if num_bytes <= limit else f"{key} has {num_bytes} bytes, the limit is {limit}"
