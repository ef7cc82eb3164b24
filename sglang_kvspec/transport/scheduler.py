"""Choice of the piece to send next, without sockets or clocks. The caller reports what happens
and what it has sent."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.flight import Flight, FlightLimits
from sglang_kvspec.transport.frames import STREAMS, Ack, Open, Stream
from sglang_kvspec.transport.openings import Openings
from sglang_kvspec.transport.outgoing import Outgoing
from sglang_kvspec.transport.segments import Piece, Segment, SegmentKey, TransferShape

# Ended transfers that are remembered, so that a late Open gets an answer.
NUM_REMEMBERED = 4096


class Choice(NamedTuple):
    """Piece to send next, its receiver, and the page at the receiver where it goes."""

    peer: bytes
    piece: Piece
    page: int
    generation: int


class Ended(NamedTuple):
    """Transfer that has ended. reason: None if it was delivered. segments: those that will not be
    sent again, though the socket may still hold parts of them."""

    transfer: int
    peer: bytes | None
    reason: str | None
    segments: tuple[Segment, ...]


class Opening(NamedTuple):
    """Result of an Open. refusal: why its receiver cannot have the transfer. ended: the transfer,
    if it ends because memory that was offered before does not fit. is_new: the Open has opened the
    transfer."""

    refusal: str | None
    ended: Ended | None = None
    is_new: bool = False


class SendScheduler:
    """Order of sending. Anchors of any transfer go before residuals of every transfer. Within a
    stream, the transfer that has waited longest goes first. Only peers with credit are served."""

    def __init__(self, limits: FlightLimits) -> None:
        self.limits = limits
        self._flights: dict[bytes, Flight] = {}
        self._transfers: dict[int, Outgoing] = {}
        self._over: dict[int, str] = {}
        # (since, tick, transfer): sorted, one entry for each transfer that waits and is open.
        self._waiting: tuple[list[tuple[float, int, int]], ...] = ([], [])
        self._ticks = 0
        self._openings = Openings()

    def add_peer(self, peer: bytes, credit_bytes: int) -> None:
        """Add a peer whose connection is live, or update the credit of a known one."""
        self._flights.setdefault(peer, Flight(self.limits)).grant(credit_bytes)

    def suspend_peer(self, peer: bytes) -> None:
        """Remove a peer whose connection is lost, and queue its pieces in flight again."""
        if (flight := self._flights.pop(peer, None)) is not None:
            self._requeue(flight.drain())

    def flight(self, peer: bytes) -> Flight | None:
        return self._flights.get(peer)

    def in_flight(self, stream: Stream) -> int:
        """Return the bytes of a stream in flight to all peers."""
        return sum(flight.bytes_of[stream] for flight in self._flights.values())

    @property
    def is_idle(self) -> bool:
        """Return True if there is no transfer and no piece in flight."""
        waiting = any(self._waiting) or any(len(flight) for flight in self._flights.values())
        return not (self._transfers or self._openings.num_pages or waiting)

    def is_open(self, transfer: int) -> bool:
        outgoing = self._transfers.get(transfer)
        return outgoing is not None and outgoing.shape is not None

    def transfers_of(self, peer: bytes) -> list[int]:
        return [t for t, outgoing in self._transfers.items() if outgoing.peer == peer]

    def offer(self, key: SegmentKey, view: memoryview, now_s: float) -> bool:
        """Queue a segment. Return False, without taking its memory, if its transfer has ended."""
        if key.transfer in self._over:
            return False
        outgoing = self._transfers.get(key.transfer) or Outgoing(key.transfer)
        was_waiting, was_offered = outgoing.waits(key.stream), outgoing.is_offered
        outgoing.offer(Segment(key, view))
        if not was_offered and outgoing.shape is not None:
            self._openings.offered(outgoing)
        self._transfers[key.transfer] = outgoing
        if not was_waiting:
            outgoing.since_s[key.stream] = now_s
            self._wait(outgoing, key.stream)
        return True

    def open(self, peer: bytes, frame: Open) -> Opening:
        """Open a transfer for the receiver `peer`."""
        if frame.transfer in self._over:
            return Opening(self._over[frame.transfer])
        outgoing = self._transfers.get(frame.transfer) or Outgoing(frame.transfer)
        is_new = outgoing.shape is None
        if is_new and (much := self._openings.refusal(peer, outgoing, len(frame.pages))):
            return Opening(much)
        try:
            shape = TransferShape.of(frame)
        except TransportError as error:
            return Opening(str(error))
        if (wrong := outgoing.open(peer, shape, frame.pages)) is not None:
            return Opening(wrong, self._end(outgoing, wrong) if is_new else None)
        if is_new:
            self._transfers[frame.transfer] = outgoing
            self._openings.opened(outgoing)
            for stream in Stream:
                self._wait(outgoing, stream)
        return Opening(None, is_new=is_new)

    def choose(self, blocked: Collection[bytes] = ()) -> Choice | None:
        """Return the next piece, for a peer that is not blocked; None if no piece may go. Does not
        change any state."""
        for stream, waiting in zip(STREAMS, self._waiting, strict=True):
            if not waiting:
                continue
            full = set(blocked)
            for _, _, transfer in waiting:
                outgoing = self._transfers[transfer]
                peer = outgoing.peer
                assert peer is not None
                if peer in full or (flight := self._flights.get(peer)) is None:
                    continue
                segment, offset, most = outgoing.peek(stream)
                if not (length := flight.fit(stream, most)):
                    full.add(peer)
                    continue
                page, generation = outgoing.pages[segment.key.page_index]
                return Choice(peer, Piece(segment, offset, length), page, generation)
        return None

    def commit(self, choice: Choice, sequence: int) -> bool:
        """Record that `choice` was sent under `sequence`. Return True if it was sent before."""
        piece = choice.piece
        _, stream, _, _ = key = piece.segment.key
        outgoing = self._transfers[key.transfer]
        again = outgoing.take(piece)
        self._flights[choice.peer].add(sequence, piece)
        if not outgoing.waits(stream):
            self._unwait(outgoing, stream)
        return again

    def acknowledge(self, peer: bytes, ack: Ack) -> tuple[list[Segment], list[Ended]]:
        """Apply an Ack. Return the segments that it delivers, and the transfers that it ends."""
        delivered: list[Segment] = []
        ended: list[Ended] = []
        if (flight := self._flights.get(peer)) is None:
            return delivered, ended
        flight.grant(ack.credit_bytes)
        arrived, lost = flight.settle(ack.highest, ack.seen, ack.echo)
        for piece in arrived:
            outgoing = self._transfers.get(piece.segment.key.transfer)
            if outgoing is not None and outgoing.deliver(piece):
                delivered.append(piece.segment)
                if outgoing.is_delivered:
                    ended.append(self._end(outgoing, None))
        self._requeue(lost)
        return delivered, ended

    def abort(self, transfer: int, reason: str) -> Ended | None:
        """End a transfer. Return None if none is under way. Its pieces in flight count until an Ack
        decides about them."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            self._remember(transfer, reason)
            return None
        return self._end(outgoing, reason)

    def _end(self, outgoing: Outgoing, reason: str | None) -> Ended:
        for stream in Stream:
            self._unwait(outgoing, stream)
        del self._transfers[outgoing.transfer]
        self._openings.ended(outgoing)
        over = "the transfer has been delivered" if reason is None else reason
        self._remember(outgoing.transfer, over)
        segments = tuple(outgoing.live.values())
        return Ended(outgoing.transfer, outgoing.peer, reason, segments)

    def _remember(self, transfer: int, reason: str) -> None:
        self._over.setdefault(transfer, reason)
        while len(self._over) > NUM_REMEMBERED:
            del self._over[next(iter(self._over))]

    def _requeue(self, pieces: Sequence[Piece]) -> None:
        by_transfer: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_transfer.setdefault(piece.segment.key.transfer, []).append(piece)
        for transfer, own in by_transfer.items():
            if (outgoing := self._transfers.get(transfer)) is None:
                continue
            outgoing.lose(own)
            # Lost pieces keep the waiting time of their stream.
            for stream in Stream:
                self._wait(outgoing, stream)

    def _wait(self, outgoing: Outgoing, stream: Stream) -> None:
        waiting = self._waiting[stream]
        if outgoing.peer is None or not outgoing.waits(stream):
            return
        if not any(entry[2] == outgoing.transfer for entry in waiting):
            self._ticks += 1
            insort(waiting, (outgoing.since_s[stream], self._ticks, outgoing.transfer))

    def _unwait(self, outgoing: Outgoing, stream: Stream) -> None:
        waiting = self._waiting[stream]
        waiting[:] = [entry for entry in waiting if entry[2] != outgoing.transfer]
