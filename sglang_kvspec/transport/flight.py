"""Pieces that were sent to one peer and are not acknowledged."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.frames import ACK_SPAN, MAX_PIECE_BYTES, Stream
from sglang_kvspec.transport.segments import Piece

# Later frames that may be read before a missing one counts as lost.
REORDER_FRAMES = 3


@dataclass(frozen=True, slots=True)
class FlightLimits:
    """Limits for one peer.

    piece_bytes: longest piece. A long piece spreads its fixed cost over more bytes. Two pieces must
    fit into residual_bytes, or each waits until the one before it is acknowledged.
    anchor_piece_bytes: the same for anchors, unless it is 0; nothing more urgent waits behind an
    anchor. residual_bytes: residuals in flight. They cannot be called back, so an anchor waits
    behind this many bytes at most. total_bytes, frames: in flight, both streams together.
    """

    piece_bytes: int = 488 << 10
    anchor_piece_bytes: int = 0
    residual_bytes: int = 1_000_000
    total_bytes: int = 4 << 20
    frames: int = 256

    def __post_init__(self) -> None:
        if not (
            1 <= self.piece_bytes <= min(MAX_PIECE_BYTES, self.residual_bytes)
            and 0 <= self.anchor_piece_bytes <= MAX_PIECE_BYTES
            and self.residual_bytes + self.longest(Stream.ANCHOR) <= self.total_bytes < 1 << 31
            and 1 <= self.frames <= ACK_SPAN // 2
        ):
            raise TransportError(f"these limits exclude one another: {self}")

    def longest(self, stream: Stream) -> int:
        """Return the bytes of the longest piece."""
        return (stream is Stream.ANCHOR and self.anchor_piece_bytes) or self.piece_bytes


UNPACED = FlightLimits(anchor_piece_bytes=MAX_PIECE_BYTES)
# For an emulated link, which lets a whole piece leave and then nothing for as long as that takes.
# There the link limits the speed, not the fixed cost of pieces.
PACED = FlightLimits(piece_bytes=240 << 10)


class Flight:
    """Pieces in flight by sequence. The peer's credit can only narrow the limits of this end."""

    def __init__(self, limits: FlightLimits) -> None:
        self._limits = limits
        self._most_bytes = limits.total_bytes
        self._pieces: dict[int, Piece] = {}
        self.bytes_of = [0, 0]

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def total_bytes(self) -> int:
        return self.bytes_of[Stream.ANCHOR] + self.bytes_of[Stream.RESIDUAL]

    def fit(self, stream: Stream, wanted: int) -> int:
        """Return the length that the next piece of a stream may have, with `wanted` bytes left; 0
        if none may go. A peer with less credit than a piece gets one shorter piece at a time."""
        limits, (anchors, residuals) = self._limits, self.bytes_of
        if len(self._pieces) >= limits.frames:
            return 0
        room = self._most_bytes - anchors - residuals
        if stream is Stream.RESIDUAL:
            room = min(room, limits.residual_bytes - residuals)
        length = min(wanted, limits.longest(stream))
        if room >= length:
            return length
        return 0 if self._pieces else max(room, 0)

    def grant(self, credit_bytes: int) -> None:
        self._most_bytes = min(self._limits.total_bytes, credit_bytes)

    def add(self, sequence: int, piece: Piece) -> None:
        assert 1 <= piece.length <= self.fit(piece.stream, piece.length)
        self._pieces[sequence] = piece
        self.bytes_of[piece.stream] += piece.length

    def settle(self, highest: int, seen: bytes, echo: int) -> tuple[list[Piece], list[Piece]]:
        """Remove the pieces that an Ack decides: (delivered, lost), each in sending order.

        A connection keeps order. A piece that is missing below the highest sequence was therefore
        damaged, or lost with a connection. The answer to a Ping proves that for all frames before
        the Ping.
        """
        bits = int.from_bytes(seen, "little")
        delivered, lost = [], []
        for sequence, piece in list(self._pieces.items()):
            if (behind := highest - sequence) < 0:
                break
            if behind < ACK_SPAN and bits >> behind & 1:
                delivered.append(piece)
            elif behind > REORDER_FRAMES or sequence < echo:
                lost.append(piece)
            else:
                continue
            self._remove(sequence)
        return delivered, lost

    def drain(self) -> list[Piece]:
        """Remove all pieces, in sending order, because the connection is lost."""
        pieces = list(self._pieces.values())
        self._pieces.clear()
        self.bytes_of = [0, 0]
        return pieces

    def _remove(self, sequence: int) -> None:
        piece = self._pieces.pop(sequence)
        self.bytes_of[piece.stream] -= piece.length
