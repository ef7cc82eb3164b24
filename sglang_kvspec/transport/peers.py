"""Receivers of a sender: which are admitted, in which session, and which are silent."""

from __future__ import annotations

from secrets import randbits
from typing import NamedTuple

from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.frames import (
    Bye,
    Frame,
    Hello,
    Identity,
    Refuse,
    SessionFrame,
    Welcome,
)
from sglang_kvspec.transport.handshake import mismatch, wrong_protocol
from sglang_kvspec.transport.segments import Part
from sglang_kvspec.transport.session import Session, Timing
from sglang_kvspec.transport.wire import Drop, FrameError

MAX_PEERS = 256


class Greeting(NamedTuple):
    """Answer to a Hello. is_new: the peer starts from nothing in a new session."""

    answer: Welcome | Refuse
    is_new: bool


class _Peer:
    """One receiver. session: None if it has been silent for too long; it may still return."""

    def __init__(self, nonce: int, session: Session, part: Part) -> None:
        self.nonce, self.part = nonce, part
        self.session: Session | None = session
        self.heard_s = session.heard_s


class Peers:
    """Peers by the name that ZMQ routes by."""

    def __init__(self, identity: Identity, timing: Timing, counters: LinkCounters) -> None:
        self._identity, self._timing, self._counters = identity, timing, counters
        self._peers: dict[bytes, _Peer] = {}

    def session(self, name: bytes | None) -> Session | None:
        peer = self._peers.get(name) if name is not None else None
        return peer.session if peer is not None else None

    def part(self, name: bytes) -> Part:
        """Return the share of the sender's KV heads that a peer has."""
        return self._peers[name].part

    def live(self) -> list[tuple[bytes, Session]]:
        return [(name, p.session) for name, p in self._peers.items() if p.session is not None]

    def admit(self, name: bytes, frame: SessionFrame, now_s: float) -> Session:
        """Record a frame in its session; return the session. Raises FrameError if it has none."""
        peer = self._peers.get(name)
        if peer is None or peer.session is None:
            raise FrameError(Drop.FOREIGN, f"session {frame.session} is unknown")
        peer.session.admit(frame, now_s)
        peer.heard_s = now_s
        return peer.session

    def greet(self, name: bytes, hello: Hello, now_s: float) -> Greeting:
        """Begin a session, repeat the answer to a repeated Hello, or refuse."""
        peer = self._peers.get(name)
        reason = mismatch(self._identity, hello.identity)
        if reason is None and peer is None and len(self._peers) >= MAX_PEERS:
            reason = f"the sender already serves {MAX_PEERS} receivers, the limit"
        if reason is not None:
            self._counters.refusals += 1
            return Greeting(Refuse(hello.nonce, reason), is_new=False)
        is_new = peer is None or peer.session is None or peer.nonce != hello.nonce
        if is_new:
            session = Session(randbits(62), self._timing, now_s)
            peer = _Peer(hello.nonce, session, Part(*hello.identity.part))
            self._peers[name] = peer
            self._counters.sessions += 1
        assert peer is not None
        assert peer.session is not None
        return Greeting(Welcome(hello.nonce, peer.session.session), is_new)

    def refuse_protocol(self, theirs: int) -> Refuse:
        self._counters.refusals += 1
        return Refuse(0, wrong_protocol(self._identity.protocol, theirs))

    def bye(self, name: bytes, frame: Frame) -> Bye | None:
        """Return the answer to a session frame of no session of this peer, else None."""
        session = self.session(name)
        if isinstance(frame, SessionFrame) and (
            session is None or session.session != frame.session
        ):
            return Bye(frame.session)
        return None

    def silence(self, now_s: float) -> list[bytes]:
        """End the sessions of peers that have fallen silent, and return these peers."""
        silent = [name for name, session in self.live() if session.is_silent(now_s)]
        for name in silent:
            self._counters.lost_sessions += 1
            self._peers[name].session = None
        return silent

    def forget_gone(self, now_s: float) -> list[tuple[bytes, float]]:
        """Forget peers that did not return. Return each with its seconds of silence."""
        gone = [
            (name, now_s - peer.heard_s)
            for name, peer in self._peers.items()
            if peer.session is None and now_s - peer.heard_s >= self._timing.gone_s
        ]
        for name, _ in gone:
            del self._peers[name]
        return gone
