"""Receiving end of a link: dials a sender and opens transfers into its own pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import randbits

from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport.arrivals import Arrival, Arrivals, Destination, Incoming
from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.frames import (
    Abort,
    Accept,
    Ack,
    Bye,
    Data,
    Frame,
    Hello,
    Identity,
    Open,
    Ping,
    Refuse,
    Stream,
    Welcome,
)
from sglang_kvspec.transport.intake import BATCH, take_in, unexpected
from sglang_kvspec.transport.port import Port
from sglang_kvspec.transport.segments import TransferShape
from sglang_kvspec.transport.session import WATCH_S, LinkState, Session, Timing
from sglang_kvspec.transport.wire import Buffer, Drop, FrameError, encode

DEFAULT_CREDIT_BYTES = 4 << 20
_SENDER = b""
_OF_SESSION = (Data, Ping, Ack, Accept, Abort)


@dataclass(slots=True)
class _Request:
    """Open of a transfer. open_at_s: when it is sent again. give_up_s: when the wait ends."""

    open_at_s: float
    give_up_s: float
    accepted: bool = False


class Receiver:
    """One link to one sender. Owned by one thread, which calls step() again and again."""

    def __init__(
        self,
        port: Port,
        identity: Identity,
        *,
        credit_bytes: int = DEFAULT_CREDIT_BYTES,
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._identity, self._clock = port, identity, clock
        self._timing = timing or Timing()
        self.counters = LinkCounters(since_s=clock())
        self._arrivals = Arrivals(self.counters)
        self._requests: dict[int, _Request] = {}
        self._credit_bytes = credit_bytes
        self._session: Session | None = None
        self._nonce = 0
        self._hello_at_s = clock()
        self._heard_s = self._watch_at_s = clock()
        self._is_more = False
        self.state = LinkState.GREETING
        self.refusal: str | None = None

    def expect(
        self,
        transfer: int,
        pages: Sequence[tuple[int, int]],
        shape: TransferShape,
        destination: Destination,
        timeout_s: float = float("inf"),
    ) -> None:
        """Open a transfer into `pages`, each (page, generation). step() returns its events."""
        if self.refusal is not None:
            raise HandshakeRefused(self.refusal)
        now_s = self._clock()
        if not self._requests and self.state is LinkState.GREETING:
            # Silence counts from here on: before, no transfer was expected.
            self._heard_s = now_s
        self._arrivals.expect(Incoming(transfer, shape, pages, destination, now_s))
        self._requests[transfer] = _Request(now_s, now_s + timeout_s)
        self._watch_at_s = now_s

    def cancel(self, transfer: int, reason: str) -> None:
        """Cancel a transfer. Nothing is written into its pages from now on. The sender is told the
        reason, in up to 512 characters."""
        self._fail(transfer, reason)
        self._tell_aborted(transfer, reason)

    def grant(self, credit_bytes: int) -> None:
        """Allow the sender credit_bytes in flight. 0 stops the sender without ending a transfer."""
        if not 0 <= credit_bytes < 1 << 31:
            raise TransportError(f"credit must be in [0, 2 GiB), got {credit_bytes}")
        self._credit_bytes = credit_bytes
        self._acknowledge(if_owed=False)

    def missing(self, transfer: int) -> tuple[int, int] | None:
        """Return the missing chunks of (anchors, residuals); None if no transfer is expected."""
        incoming = self._arrivals.incoming.get(transfer)
        return None if incoming is None else (incoming.missing[0], incoming.missing[1])

    def step(self, timeout_s: float = 0.0) -> list[Arrival]:
        """Read, write, acknowledge, check timers; wait for at most timeout_s if nothing comes."""
        events = self._turn()
        end_s = self._clock() + timeout_s
        while timeout_s > 0 and not events:
            is_news = self._is_more or self._port.wait(min(timeout_s, self._timing.probe_s))
            events = self._turn()
            timeout_s = end_s - self._clock() if is_news else 0.0
        return events

    def wake(self) -> None:
        """End the wait of the current step() or else of the next. Any thread may call it."""
        self._port.wake()

    @property
    def is_idle(self) -> bool:
        return not (self._requests or self._arrivals.incoming)

    def close(self) -> None:
        self._port.close()

    def _turn(self) -> list[Arrival]:
        self._is_more = take_in(self._port, self.counters, self._handle) == BATCH
        self._acknowledge()
        now_s = self._clock()
        if now_s >= self._watch_at_s and self.state is not LinkState.REFUSED:
            self._watch_at_s = now_s + WATCH_S
            self._watch(now_s)
        if events := self._arrivals.take_events():
            for transfer in self._requests.keys() - self._arrivals.incoming.keys():
                del self._requests[transfer]
        return events

    def _handle(self, _: bytes, frame: Frame, payload: Buffer | None) -> None:
        if isinstance(frame, _OF_SESSION):
            self._handle_in_session(frame, payload)
        elif isinstance(frame, Welcome):
            self._welcome(frame)
        elif isinstance(frame, Refuse):
            if self.state is not LinkState.GREETING or frame.nonce not in (0, self._nonce):
                raise FrameError(Drop.FOREIGN, "the refusal answers no Hello of this end")
            self._refused(frame.reason)
        elif isinstance(frame, Bye):
            if self._session is None or frame.session != self._session.session:
                raise FrameError(Drop.FOREIGN, f"the Bye is for session {frame.session}")
            self._lose_session()
        else:
            raise unexpected(frame)

    def _handle_in_session(
        self, frame: Data | Ping | Ack | Accept | Abort, payload: Buffer | None
    ) -> None:
        if self._session is None:
            raise FrameError(
                Drop.FOREIGN, f"the frame has session {frame.session}, this end has no session"
            )
        now_s = self._clock()
        self._session.admit(frame, now_s)
        self._heard_s = now_s
        if isinstance(frame, Data):
            assert payload is not None
            self._write(frame, payload, now_s)
        elif isinstance(frame, Accept):
            if frame.transfer in self._requests:
                self._requests[frame.transfer].accepted = True
        elif isinstance(frame, Abort):
            self._fail(frame.transfer, f"the sender ended the transfer: {frame.reason}")

    def _write(self, frame: Data, payload: Buffer, now_s: float) -> None:
        try:
            if self._arrivals.write(frame, payload, now_s):
                request = self._requests[frame.transfer]
                request.open_at_s = now_s + self._timing.silence_s
        except FrameError as error:
            if error.drop in (Drop.RECYCLED, Drop.NO_ROOM):
                self.cancel(frame.transfer, str(error))
            elif error.drop is Drop.UNKNOWN:
                self._tell_aborted(frame.transfer, self._arrivals.reason_of(frame.transfer))
            raise

    def _welcome(self, frame: Welcome) -> None:
        if self.state is not LinkState.GREETING or frame.nonce != self._nonce:
            raise FrameError(Drop.FOREIGN, f"no Hello of nonce {frame.nonce} awaits a Welcome")
        now_s = self._clock()
        self.state = LinkState.LIVE
        self._session = Session(frame.session, self._timing, now_s)
        self._heard_s = self._watch_at_s = now_s
        self.counters.sessions += 1
        for request in self._requests.values():
            request.open_at_s, request.accepted = now_s, False

    def _watch(self, now_s: float) -> None:
        if self._session is not None and self._session.is_silent(now_s):
            self._lose_session()
        if self._session is None:
            self._greet(now_s)
        elif (ping := self._session.ping(now_s, awaits_ack=False)) is not None:
            self._port.send(_SENDER, encode(ping))
        silent_s = now_s - self._heard_s
        for transfer, request in list(self._requests.items()):
            if self._session is None and silent_s >= self._timing.gone_s:
                self._fail(transfer, f"the sender was silent for {silent_s:.1f} s")
            elif now_s >= request.give_up_s:
                self.cancel(transfer, "the transfer took longer than its receiver waits")
            elif self._session is not None and now_s >= request.open_at_s:
                self._open(transfer, request, now_s)

    def _greet(self, now_s: float) -> None:
        if now_s < self._hello_at_s:
            return
        # A new nonce would make the sender drop the session of a Welcome that is under way.
        self._nonce = self._nonce or randbits(62) + 1
        hello = Hello(self._nonce, self._identity, self._credit_bytes)
        self._port.send(_SENDER, encode(hello))
        self._hello_at_s = now_s + self._timing.retry_s

    def _lose_session(self) -> None:
        self.counters.lost_sessions += 1
        self.state, self._session, self._nonce = LinkState.GREETING, None, 0
        self._hello_at_s = self._watch_at_s = self._clock()
        self._port.reset()

    def _refused(self, reason: str) -> None:
        self.state, self.refusal = LinkState.REFUSED, reason
        self.counters.refusals += 1
        for transfer in list(self._requests):
            self._fail(transfer, reason)

    def _open(self, transfer: int, request: _Request, now_s: float) -> None:
        assert self._session is not None
        incoming = self._arrivals.incoming[transfer]
        shape = incoming.shape
        frame = Open(
            self._session.session,
            self._session.stamp(),
            transfer,
            incoming.pages,
            shape.num_chunks,
            shape.anchor_bytes,
            shape.residual_bytes,
            shape.num_pages_of(Stream.RESIDUAL),
        )
        self._port.send(_SENDER, encode(frame))
        again_s = self._timing.silence_s if request.accepted else self._timing.retry_s
        request.open_at_s = now_s + again_s

    def _fail(self, transfer: int, reason: str) -> None:
        self._requests.pop(transfer, None)
        self._arrivals.fail(transfer, reason)

    def _tell_aborted(self, transfer: int, reason: str) -> None:
        if self._session is not None:
            frame = Abort(self._session.session, self._session.stamp(), transfer, reason[:512])
            self._port.send(_SENDER, encode(frame))

    def _acknowledge(self, *, if_owed: bool = True) -> None:
        if self._session is None:
            return
        if (ack := self._session.ack(self._credit_bytes, if_owed=if_owed)) is not None:
            self._port.send(_SENDER, encode(ack))
