"""Sending end of a link: listens, and sends the transfers that receivers open."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.flight import PACED, UNPACED, FlightLimits
from sglang_kvspec.transport.frames import (
    STREAMS,
    Abort,
    Accept,
    Ack,
    Data,
    Frame,
    Hello,
    Identity,
    Open,
    Ping,
)
from sglang_kvspec.transport.holds import Holds
from sglang_kvspec.transport.intake import BATCH, take_in, unexpected
from sglang_kvspec.transport.openings import LastAsked
from sglang_kvspec.transport.peers import Peers
from sglang_kvspec.transport.port import Port
from sglang_kvspec.transport.scheduler import Choice, Ended, SendScheduler
from sglang_kvspec.transport.segments import Segment, SegmentKey, number_of, on_the_wire
from sglang_kvspec.transport.session import WATCH_S, Timing
from sglang_kvspec.transport.shaping import TokenBucket
from sglang_kvspec.transport.wire import Buffer, encode


@dataclass(frozen=True, slots=True)
class TransferOpened:
    """Event: a receiver waits for the transfer, whether or not it was offered. num_parts: number of
    these receivers, each for its chunk of every page."""

    transfer: int
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class SegmentReleased:
    """Event: the caller may reuse a segment's memory: delivered, or its transfer has ended."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """Event: all memory of a transfer is released. reason: None if the receiver has all of it. The
    reason of a receiver that cancels is unchanged."""

    transfer: int
    reason: str | None


SendEvent = TransferOpened | SegmentReleased | TransferEnded
_FROM_RECEIVER = (Ping, Ack, Open, Abort)


class Sender:
    """Sender of KV, owned by one thread, which calls step() again and again. Only step() blocks,
    for its timeout at most. Numbers of transfers are those of segments.number_of(), from the number
    on the wire and the part that the receiver has."""

    def __init__(
        self,
        port: Port,
        identity: Identity,
        *,
        limits: FlightLimits | None = None,
        timing: Timing | None = None,
        link: TokenBucket | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._link, self._clock = port, link, clock
        self._timing = timing or Timing()
        self.scheduler = SendScheduler(limits or (PACED if link else UNPACED))
        self.counters = LinkCounters(since_s=clock())
        self.peers = Peers(identity, self._timing, self.counters)
        self._holds = Holds()
        self._asked = LastAsked()
        self._unreleased: Counter[int] = Counter()
        self._reasons: dict[int, str | None] = {}
        self._events: list[SendEvent] = []
        self._stepped_s = self._watch_at_s = clock()

    def offer(self, key: SegmentKey, memory: memoryview) -> bool:
        """Send a chunk once its receiver has opened the transfer, anchors first. The memory may not
        change until SegmentReleased. Return False, without taking the memory, if the transfer has
        ended. Raises TransportError for a chunk that does not fit an open transfer; a chunk that
        was offered before the Open ends the transfer instead."""
        taken = self.scheduler.offer(key, memory.cast("B"), self._clock())
        self._unreleased[key.transfer] += taken
        self._asked.forget(key.transfer)
        return taken

    def abort(self, transfer: int, reason: str) -> None:
        """Abort a transfer, here and at its receiver. Events release its memory."""
        if (ended := self.scheduler.abort(transfer, reason)) is not None:
            self._end(ended)
            self._tell_aborted(ended.peer, transfer, reason)

    def is_open(self, transfer: int) -> bool:
        """Return True if a receiver has opened the transfer and it has not ended."""
        return self.scheduler.is_open(transfer)

    def step(self, timeout_s: float = 0.0) -> list[SendEvent]:
        """Read, send, check timers; wait for at most timeout_s if there is nothing to do."""
        is_more = self._turn()
        end_s = self._clock() + timeout_s
        while timeout_s > 0 and not self._events:
            is_news = is_more or self._port.wait(self._pause_s(timeout_s))
            is_more = self._turn()
            timeout_s = end_s - self._clock() if is_news else 0.0
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """End the wait of the current step() or else of the next. Any thread may call it."""
        self._port.wake()

    @property
    def is_idle(self) -> bool:
        """Return True if there is no transfer, no unreleased memory and nothing in flight."""
        idle = not (self._unreleased or self._reasons or self._events or len(self._holds))
        return idle and self.scheduler.is_idle

    def close(self) -> None:
        self._port.close()

    def _turn(self) -> bool:
        """Do what is due. Return True if there may be more to do at once."""
        num_read = take_in(self._port, self.counters, self._handle, self._refuse_protocol)
        num_sent = self._send_pieces()
        now_s = self._clock()
        self._count_busy(now_s)
        if now_s >= self._watch_at_s:
            self._watch_at_s = now_s + WATCH_S
            self._watch(now_s)
        self._release()
        return BATCH in (num_read, num_sent)

    def _pause_s(self, timeout_s: float) -> float:
        pause_s = min(timeout_s, self._timing.probe_s)
        if self._link is not None and self.scheduler.choose() is not None:
            pause_s = min(pause_s, self._link.delay_s(self._clock()))
        return pause_s

    def _send_pieces(self) -> int:
        """Send pieces while credit, the link and ZMQ allow, at most BATCH before the next read."""
        blocked: set[bytes] = set()
        for num_sent in range(BATCH):
            if self._link is not None and self._link.delay_s(self._clock()) > 0:
                return num_sent
            choice = self.scheduler.choose(blocked)
            if choice is None:
                return num_sent
            if not self._send_piece(choice):
                # ZMQ takes nothing for this peer. Acks or silence will show whether it is lost.
                blocked.add(choice.peer)
        return BATCH

    def _send_piece(self, choice: Choice) -> bool:
        session = self.peers.session(choice.peer)
        assert session is not None
        segment, offset, length = choice.piece
        transfer, stream, _, chunk = segment.key
        sequence = session.stamp()
        frame = Data(
            session=session.session,
            sequence=sequence,
            transfer=on_the_wire(transfer),
            stream=stream,
            page=choice.page,
            generation=choice.generation,
            chunk=chunk,
            size=len(segment.view),
            offset=offset,
            length=length,
        )
        payload = segment.view[offset : offset + length]
        hold = self._port.send(choice.peer, encode(frame, payload), payload)
        if hold is None:
            return False
        if not hold.done:
            self._holds.add(segment, hold)
        again = self.scheduler.commit(choice, sequence)
        counted = self.counters.streams[stream]
        counted.frames += 1
        counted.payload_bytes += length
        if again:
            counted.resent_bytes += length
        if self._link is not None:
            self._link.spend(length, self._clock())
        return True

    def _handle(self, name: bytes, frame: Frame, payload: Buffer | None) -> None:
        if isinstance(frame, Hello):
            self._greet(name, frame)
            return
        if not isinstance(frame, _FROM_RECEIVER):
            raise unexpected(frame)
        if (bye := self.peers.bye(name, frame)) is not None:
            self._port.send(name, encode(bye))
        session = self.peers.admit(name, frame, self._clock())
        if isinstance(frame, Ack):
            delivered, ended = self.scheduler.acknowledge(name, frame)
            self._retire(delivered)
            for end in ended:
                self._end(end)
            return
        if isinstance(frame, Ping):
            if (ack := session.ack(credit_bytes=0)) is not None:
                self._port.send(name, encode(ack))
            return
        number = number_of(frame.transfer, self.peers.part(name))
        frame = replace(frame, transfer=number)
        if isinstance(frame, Open):
            opening = self.scheduler.open(name, frame)
            if opening.refusal is None:
                if not self._unreleased[frame.transfer]:
                    self._asked.asked(frame.transfer, self._clock())
                accept = Accept(session.session, session.stamp(), on_the_wire(frame.transfer))
                self._port.send(name, encode(accept))
            else:
                self._tell_aborted(name, frame.transfer, opening.refusal)
            if opening.is_new:
                self._events.append(TransferOpened(frame.transfer))
            if opening.ended is not None:
                self._end(opening.ended)
        elif frame.transfer in self.scheduler.transfers_of(name):
            ended_here = self.scheduler.abort(frame.transfer, frame.reason)
            assert ended_here is not None
            self._end(ended_here)

    def _greet(self, name: bytes, hello: Hello) -> None:
        answer, is_new = self.peers.greet(name, hello, self._clock())
        if is_new:
            self.scheduler.suspend_peer(name)
            self.scheduler.add_peer(name, hello.credit_bytes)
        self._port.send(name, encode(answer))

    def _refuse_protocol(self, name: bytes, theirs: int) -> None:
        self._port.send(name, encode(self.peers.refuse_protocol(theirs)))

    def _watch(self, now_s: float) -> None:
        # Twice: by then, a receiver that was not heard has itself failed its transfers.
        for transfer in self._asked.take_stale(now_s - 2 * self._timing.gone_s):
            self.abort(transfer, "the receiver no longer asks for the transfer")
        for name in self.peers.silence(now_s):
            self.scheduler.suspend_peer(name)
        for name, silent_s in self.peers.forget_gone(now_s):
            for transfer in self.scheduler.transfers_of(name):
                self.abort(transfer, f"the receiver was silent for {silent_s:.1f} s")
        for name, session in self.peers.live():
            flight = self.scheduler.flight(name)
            if ping := session.ping(now_s, awaits_ack=bool(flight)):
                self._port.send(name, encode(ping))

    def _tell_aborted(self, name: bytes | None, transfer: int, reason: str) -> None:
        if name is not None and (session := self.peers.session(name)) is not None:
            stamp = session.stamp()
            frame = Abort(session.session, stamp, on_the_wire(transfer), reason[:512])
            self._port.send(name, encode(frame))

    def _end(self, ended: Ended) -> None:
        self.counters.completed += ended.reason is None
        self.counters.failed += ended.reason is not None
        self._reasons[ended.transfer] = ended.reason
        self._asked.forget(ended.transfer)
        self._retire(ended.segments)

    def _retire(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self._holds.retire(segment)

    def _release(self) -> None:
        for key in self._holds.release():
            self._unreleased[key.transfer] -= 1
            self._events.append(SegmentReleased(key))
        for transfer in [t for t in self._reasons if not self._unreleased[t]]:
            del self._unreleased[transfer]
            self._events.append(TransferEnded(transfer, self._reasons.pop(transfer)))

    def _count_busy(self, now_s: float) -> None:
        passed_s, self._stepped_s = now_s - self._stepped_s, now_s
        is_busy = False
        for stream in STREAMS:
            if self.scheduler.in_flight(stream):
                self.counters.streams[stream].busy_s += passed_s
                is_busy = True
        if is_busy:
            self.counters.link_busy_s += passed_s
