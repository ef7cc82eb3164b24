"""Segments of a transfer: chunks of pages in the caller's memory, which are cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.frames import MAX_CHUNKS, MAX_PAGES, Open, Stream


@dataclass(frozen=True, slots=True)
class TransferShape:
    """Shape of a transfer at both ends: pages x chunks, and the most bytes of a chunk in each
    stream. A chunk is contiguous memory: a layer of a page, or a whole page. Only the first
    num_residual_pages pages (None: all) have residuals; none has if residual_bytes is 0."""

    num_pages: int
    num_chunks: int
    anchor_bytes: int
    residual_bytes: int
    num_residual_pages: int | None = None

    def __post_init__(self) -> None:
        if not (
            1 <= self.num_pages <= MAX_PAGES
            and 1 <= self.num_chunks <= MAX_CHUNKS
            and 1 <= self.anchor_bytes < 1 << 31
            and 0 <= self.residual_bytes < 1 << 31
            and 0 <= (self.num_residual_pages or 0) <= self.num_pages
        ):
            raise TransportError(f"no transfer can have the shape {self}")

    @classmethod
    def of(cls, frame: Open) -> TransferShape:
        return cls(
            len(frame.pages),
            frame.num_chunks,
            frame.anchor_bytes,
            frame.residual_bytes,
            frame.num_residual_pages,
        )

    def chunk_bytes(self, stream: Stream) -> int:
        """Return the bytes of the largest chunk."""
        return self.anchor_bytes if stream is Stream.ANCHOR else self.residual_bytes

    def num_pages_of(self, stream: Stream) -> int:
        """Return how many pages have a record in a stream: the first ones of the transfer."""
        if not self.chunk_bytes(stream):
            return 0
        if stream is Stream.ANCHOR or self.num_residual_pages is None:
            return self.num_pages
        return self.num_residual_pages

    def num_segments(self, stream: Stream) -> int:
        return self.num_pages_of(stream) * self.num_chunks


# Bits of a transfer's number on the wire, and of a part's place.
_WIRE_BITS = 63
_PLACE_BITS = 16


class Part(NamedTuple):
    """Share `place` of `total` equal shares of a sender's KV heads, which one receiver has."""

    place: int
    total: int


def number_of(transfer: int, part: Part) -> int:
    """Return a sender's own number for a part of a transfer. On the wire, receivers of all parts
    use one number, which is also the number of the whole, Part(0, 1)."""
    assert part.place < part.total <= 1 << _PLACE_BITS, part
    return transfer | (part.total - 1 << _PLACE_BITS | part.place) << _WIRE_BITS


def part_of(number: int) -> Part:
    share = number >> _WIRE_BITS
    return Part(share & (1 << _PLACE_BITS) - 1, (share >> _PLACE_BITS) + 1)


def on_the_wire(number: int) -> int:
    """Return the number of a transfer on the wire, which both ends know."""
    return number & (1 << _WIRE_BITS) - 1


class SegmentKey(NamedTuple):
    """One chunk of one page in one stream of a transfer. page_index: among the transfer's pages."""

    transfer: int
    stream: Stream
    page_index: int
    chunk: int


class Segment:
    """A chunk in the sender's memory. The memory must not change until the segment is released."""

    __slots__ = ("cut", "key", "undelivered", "view")

    def __init__(self, key: SegmentKey, view: memoryview) -> None:
        self.key = key
        self.view = view
        # Bytes below `cut` have become pieces.
        self.cut = 0
        self.undelivered = len(view)


class Piece(NamedTuple):
    """Part of a segment that fits a frame. A piece may be sent again; its place never changes."""

    segment: Segment
    offset: int
    length: int

    @property
    def stream(self) -> Stream:
        return self.segment.key.stream
