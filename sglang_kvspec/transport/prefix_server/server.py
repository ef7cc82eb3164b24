"""Prefix server: listens, looks prefixes up, sends them and stores published ones."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_kvspec.core.errors import PrefixStoreError
from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.intake import take_in_of
from sglang_kvspec.transport.port import Port
from sglang_kvspec.transport.prefix_server.peers import Peer, Peers
from sglang_kvspec.transport.prefix_server.shelves import Shelves
from sglang_kvspec.transport.prefixes.frames import (
    STORE_PROTOCOL,
    STORE_WIRE,
    Admit,
    AnyStoreFrame,
    Deny,
    Fetch,
    FromServer,
    Greet,
    Part,
    Probe,
    Publish,
    Seek,
    Unknown,
)
from sglang_kvspec.transport.wire import Buffer, Drop, FrameError

logger = logging.getLogger(__name__)

# Pieces sent before frames are read again.
_PIECES_AT_ONCE = 16
# Wait for room in ZMQ, which reports no event for it.
_FULL_WAIT_S = 0.002


@dataclass(slots=True)
class ServerCounters:
    """Totals. lookups: answered. pages_found: with residual, of these lookups. pages_gone: records
    that were asked for and are not there. pages_kept: published pages that are in the store or its
    queue."""

    lookups: int = 0
    pages_found: int = 0
    pages_gone: int = 0
    pages_kept: int = 0
    pages_not_kept: int = 0
    sent_bytes: Counter[Stream] = field(default_factory=Counter)


class PrefixServer:
    """Prefix server, owned by one thread, which calls step() again and again. Anchors for any
    server go before residuals for every server. Servers take turns."""

    def __init__(
        self, port: Port, shelves: Shelves, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port, self._clock = port, clock
        self._peers = Peers(shelves)
        self._turn = 0
        # Reason of the last refusal that was logged; None once a server was admitted.
        self._refused: str | None = None
        self.link_counters = LinkCounters(since_s=clock())
        self.counters = ServerCounters()

    def step(self, timeout_s: float = 0.0) -> None:
        """Do what is due, or wait if nothing is. timeout_s: the longest wait."""
        num_read = take_in_of(
            STORE_WIRE, self._port, self.link_counters, self._handle, self._refuse_protocol
        )
        self._peers.forget_gone(self._clock())
        num_sent = self._send_pieces()
        if not (num_read or num_sent):
            is_full = any(peer.outbox.has(s) for _, peer in self._peers.items() for s in Stream)
            self._port.wait(min(timeout_s, _FULL_WAIT_S) if is_full else timeout_s)

    def wake(self) -> None:
        """End the wait of the current step() or else of the next. Any thread may call it."""
        self._port.wake()

    def close(self) -> None:
        self._port.close()

    # Incoming frames

    def _handle(self, name: bytes, frame: AnyStoreFrame, payload: Buffer | None) -> None:
        now_s = self._clock()
        if isinstance(frame, Greet):
            self._greet(name, frame, now_s)
            return
        if not isinstance(frame, FromServer):
            raise FrameError(Drop.FOREIGN, f"this end does not accept {type(frame).__name__}")
        peer = self._peers.of(name, frame.session, now_s)
        if peer is None:
            self._answer(name, Unknown(frame.session))
            raise FrameError(Drop.FOREIGN, f"session {frame.session} is unknown")
        self._serve(name, peer, frame, payload)

    def _greet(self, name: bytes, frame: Greet, now_s: float) -> None:
        try:
            peer = self._peers.greet(name, frame, now_s)
        except PrefixStoreError as error:
            self.link_counters.refusals += 1
            if str(error) != self._refused:
                self._refused = str(error)
                logger.warning(
                    "KVSpec: refused a server (%s): that server computes its prompts without these "
                    "prefixes, which costs speed and changes no output",
                    error,
                )
            self._answer(name, Deny(frame.nonce, str(error)[:512]))
        else:
            self._refused = None
            self._answer(name, Admit(frame.nonce, peer.session))

    def _serve(self, name: bytes, peer: Peer, frame: FromServer, payload: Buffer | None) -> None:
        if isinstance(frame, Probe):
            self._answer(name, frame)
        elif isinstance(frame, Seek):
            found = peer.seek(frame)
            self.counters.lookups += 1
            self.counters.pages_found += found.num_complete
            self._answer(name, found)
        elif isinstance(frame, Fetch):
            peer.outbox.ask(frame)
        elif isinstance(frame, Publish):
            peer.publish(frame)
        elif isinstance(frame, Part) and payload is not None:
            kept = peer.part(frame, payload)
            if kept is not None:
                self.counters.pages_kept += kept.is_kept
                self.counters.pages_not_kept += not kept.is_kept
                self._answer(name, kept)

    def _refuse_protocol(self, name: bytes, theirs: int) -> None:
        self.link_counters.refusals += 1
        reason = f"the prefix server speaks protocol {STORE_PROTOCOL}, the server {theirs}"
        self._answer(name, Deny(0, reason))

    # Outgoing frames

    def _answer(self, name: bytes, frame: AnyStoreFrame) -> None:
        """Send an answer, or drop it if ZMQ takes none now: the server then gives up by itself."""
        self._port.send(name, STORE_WIRE.encode(frame))

    def _send_pieces(self) -> int:
        for num_sent in range(_PIECES_AT_ONCE):
            if not any(self._send_one(stream) for stream in Stream):
                return num_sent
        return _PIECES_AT_ONCE

    def _send_one(self, stream: Stream) -> bool:
        """Send a piece of a stream to the server whose turn it is. Return False if none may go."""
        peers = self._peers.items()
        for i in range(len(peers)):
            name, peer = peers[(self._turn + i) % len(peers)]
            may_send = peer.outbox.has(stream) and not peer.outbox.is_full
            if may_send and self._send(name, peer, stream):
                self._turn = (self._turn + i + 1) % len(peers)
                return True
        return False

    def _send(self, name: bytes, peer: Peer, stream: Stream) -> bool:
        frame, payload = peer.outbox.next(stream)
        hold = self._port.send(name, STORE_WIRE.encode(frame, payload), payload)
        if hold is None:
            return False
        num_bytes = 0 if payload is None else len(payload)
        peer.outbox.sent(stream, hold, num_bytes)
        self.counters.pages_gone += payload is None
        self.counters.sent_bytes[stream] += num_bytes
        return True
