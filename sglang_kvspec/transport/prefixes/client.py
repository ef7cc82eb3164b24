"""Client of a prefix server: dials it, looks prefixes up, fetches them and publishes its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import randbits

from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.intake import take_in_of
from sglang_kvspec.transport.port import Port
from sglang_kvspec.transport.prefixes.events import LookupEnded, PublishEnded, StoreEvent
from sglang_kvspec.transport.prefixes.fetching import Fetching
from sglang_kvspec.transport.prefixes.frames import (
    STORE_PROTOCOL,
    STORE_WIRE,
    Admit,
    AnyStoreFrame,
    Chain,
    Deny,
    Found,
    Gone,
    Greet,
    Kept,
    Piece,
    Probe,
    Seek,
    StoreLayout,
    Unknown,
)
from sglang_kvspec.transport.prefixes.publishing import Publishing
from sglang_kvspec.transport.session import LinkState
from sglang_kvspec.transport.shaping import TokenBucket
from sglang_kvspec.transport.wire import Buffer, Drop, FrameError

logger = logging.getLogger(__name__)

_STORE = b""
# Frames of published pages that are sent before this end reads again.
_PARTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class StoreTiming:
    """Times of the link. probe_s: silence after which the prefix server is probed. silence_s:
    silence after which the link counts as lost, with all lookups and uploads. retry_s: between
    greetings. denied_s: from a denial to the next greeting. absent_s: time without a link, from the
    start on, after which the log says so."""

    probe_s: float = 0.5
    silence_s: float = 1.5
    retry_s: float = 0.5
    denied_s: float = 10.0
    absent_s: float = 10.0


class StoreClient:
    """One link to one prefix server. Owned by one thread, which calls step() again and again."""

    def __init__(
        self,
        port: Port,
        layout: StoreLayout,
        *,
        bucket: TokenBucket | None = None,
        timing: StoreTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
        address: str = "",
    ) -> None:
        """bucket: bandwidth that publishing may use. address: the prefix server's, for the log."""
        self._port, self._layout, self._bucket, self._clock = port, layout, bucket, clock
        self._timing = timing or StoreTiming()
        self.counters = LinkCounters(since_s=clock())
        self.published_bytes = 0
        self.state = LinkState.GREETING
        # Why the prefix server denied this server; None once it has admitted it.
        self.denial: str | None = None
        self._session, self._nonce = 0, randbits(62)
        self._greet_at_s = self._heard_s = self._probed_s = clock()
        self._fetching, self._publishing = Fetching(layout), Publishing()
        self._events: list[StoreEvent] = []
        self._log = _StateLog(address)

    def seek(
        self, lookup: int, chain: Chain, keys: Sequence[bytes], *, anchors_first: bool = False
    ) -> None:
        """Fetch the pages of `chain` that the prefix server has. keys: keys of these pages.
        anchors_first: if it has all pages, fetch all anchors before any residual. Without a link,
        the lookup ends at once."""
        if self.state is not LinkState.LIVE:
            self._events.append(LookupEnded(lookup, 0, "no link to the prefix server"))
            return
        self._fetching.seek(lookup, keys, anchors_first=anchors_first)
        if not self._send(Seek(self._session, lookup, *chain)):
            self._fetching.cancel(lookup)
            self._events.append(LookupEnded(lookup, 0, "the prefix server takes no more lookups"))

    def cancel(self, lookup: int) -> None:
        """Cancel a lookup. It has no more events."""
        self._fetching.cancel(lookup)

    def publish(self, upload: int, chain: Chain, content: memoryview) -> None:
        """Publish one page. chain: of this page. content: its anchor, then its residual."""
        if self.state is LinkState.LIVE:
            self._publishing.add(upload, chain, content)
        else:
            self._events.append(PublishEnded(upload, is_kept=False))

    def step(self, timeout_s: float = 0.0) -> list[StoreEvent]:
        """Do what is due, or wait if nothing is; return the events. timeout_s: the longest wait."""
        num_read = take_in_of(STORE_WIRE, self._port, self.counters, self._handle, self._other)
        self._keep_up()
        is_sending = self._send_what_is_due()
        if not (num_read or is_sending or self._events):
            self._port.wait(min(timeout_s, self._next_s()))
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """End the wait of the current step() or else of the next. Any thread may call it."""
        self._port.wake()

    def close(self) -> None:
        self._port.close()

    # The link

    def _keep_up(self) -> None:
        now_s = self._clock()
        if self.state is LinkState.LIVE:
            if now_s - self._heard_s >= self._timing.silence_s:
                self._lose("the prefix server does not answer")
            elif now_s - max(self._heard_s, self._probed_s) >= self._timing.probe_s:
                self._probed_s = now_s
                self._send(Probe(self._session))
            return
        if now_s - self.counters.since_s >= self._timing.absent_s:
            self._log.note_loss("no answer since this server started")
        if now_s >= self._greet_at_s:
            self._greet_at_s = now_s + self._timing.retry_s
            self._send(Greet(self._nonce, self._layout))

    def _lose(self, reason: str) -> None:
        self.counters.lost_sessions += 1
        self._log.note_loss(reason)
        self.state, self._greet_at_s = LinkState.GREETING, self._clock()
        self._nonce = randbits(62)
        self._events += self._fetching.end_all(reason)
        self._events += self._publishing.end_all()
        # Frames that were not read are of no use to the next prefix server at this address.
        self._port.reset()

    def _deny(self, reason: str) -> None:
        self.counters.refusals += 1
        self._log.note_denial(reason)
        self.state, self.denial = LinkState.REFUSED, reason
        self._greet_at_s = self._clock() + self._timing.denied_s

    def _next_s(self) -> float:
        now_s = self._clock()
        if self.state is not LinkState.LIVE:
            return max(0.0, self._greet_at_s - now_s)
        due_s = max(self._heard_s, self._probed_s) + self._timing.probe_s
        waits = [due_s - now_s, self._heard_s + self._timing.silence_s - now_s]
        if self._bucket is not None and self._publishing.next_frame(self._session) is not None:
            waits.append(self._bucket.delay_s(now_s))
        return max(0.0, min(waits))

    # Frames

    def _send(self, frame: AnyStoreFrame, payload: memoryview | None = None) -> bool:
        head = STORE_WIRE.encode(frame, payload)
        return self._port.send(_STORE, head, payload) is not None

    def _send_what_is_due(self) -> bool:
        if self.state is not LinkState.LIVE:
            return False
        for fetch in self._fetching.next_fetches(self._session):
            if not self._send(fetch):
                self._lose("the prefix server takes no more frames")
                return False
        for num_sent in range(_PARTS_AT_ONCE):
            if not self._send_part():
                return num_sent > 0
        return True

    def _send_part(self) -> bool:
        now_s = self._clock()
        outgoing = self._publishing.next_frame(self._session)
        if outgoing is None or (self._bucket is not None and self._bucket.delay_s(now_s) > 0):
            return False
        frame, payload = outgoing
        if not self._send(frame, payload):
            return False
        self._publishing.sent(outgoing)
        if payload is not None:
            self.published_bytes += len(payload)
            if self._bucket is not None:
                self._bucket.spend(len(payload), now_s)
        return True

    def _other(self, _: bytes, theirs: int) -> None:
        self._deny(f"the prefix server speaks protocol {theirs}, this server {STORE_PROTOCOL}")

    def _handle(self, _: bytes, frame: AnyStoreFrame, payload: Buffer | None) -> None:
        if isinstance(frame, Admit | Deny):
            self._greeted(frame)
            return
        session = getattr(frame, "session", None)
        if self.state is not LinkState.LIVE or session != self._session:
            raise FrameError(
                Drop.FOREIGN, f"the frame has session {session}, expected {self._session}"
            )
        if isinstance(frame, Unknown):
            self._lose("the prefix server has restarted")
            return
        self._heard_s = self._clock()
        if isinstance(frame, Found):
            self._events += self._fetching.found(frame)
        elif isinstance(frame, Piece) and payload is not None:
            self._events += self._fetching.piece(frame, payload)
            counted = self.counters.streams[Stream(frame.stream)]
            counted.frames += 1
            counted.payload_bytes += len(payload)
        elif isinstance(frame, Gone):
            self._events += self._fetching.gone(frame)
        elif isinstance(frame, Kept):
            self._events += self._publishing.kept(frame)
        elif not isinstance(frame, Probe):
            raise FrameError(Drop.FOREIGN, f"this end does not accept {type(frame).__name__}")

    def _greeted(self, frame: Admit | Deny) -> None:
        if self.state is LinkState.LIVE or frame.nonce not in (0, self._nonce):
            raise FrameError(Drop.FOREIGN, f"no greeting of nonce {frame.nonce} awaits an answer")
        if isinstance(frame, Deny):
            self._deny(frame.reason)
            return
        self._log.note_link()
        self.state, self.denial = LinkState.LIVE, None
        self._session, self._heard_s = frame.session, self._clock()
        self.counters.sessions += 1


class _StateLog:
    """One line in the log for each change of the link, however many requests it concerns."""

    LOSS = "prompts are computed without its prefixes, which costs speed and changes no output"

    def __init__(self, address: str) -> None:
        self._name = f"the prefix server {address}".rstrip()
        # "linked", "lost" or why the prefix server denies; None before the first line.
        self._said: str | None = None

    def note_link(self) -> None:
        if self._turns_to("linked"):
            logger.info("KVSpec: linked to %s: prompts use its prefixes", self._name)

    def note_loss(self, reason: str) -> None:
        # A prefix server that denies this server is not lost.
        if self._said in (None, "linked") and self._turns_to("lost"):
            logger.warning("KVSpec: no link to %s (%s): %s", self._name, reason, self.LOSS)

    def note_denial(self, reason: str) -> None:
        if self._turns_to(reason):
            logger.warning("KVSpec: %s refuses this server (%s): %s", self._name, reason, self.LOSS)

    def _turns_to(self, said: str) -> bool:
        is_new = said != self._said
        self._said = said
        return is_new
