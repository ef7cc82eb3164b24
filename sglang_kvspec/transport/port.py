"""One ZMQ socket: messages in and out, without blocking, in bounded queues."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import zmq

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.keys import CurveKeys, Gatekeeper, check_address
from sglang_kvspec.transport.wire import MAX_PART_BYTES, Buffer

# Below this size, a copy is cheaper than watching when ZMQ is done with the memory.
COPY_BELOW_BYTES = 128 << 10
# Frames of one peer that ZMQ takes off the network before they are read here. Credit stops honest
# senders long before that.
MAX_WAITING_FRAMES = 64
# More than a flight and the frames around it, so that credit stops a sender before this limit.
MAX_UNSENT_FRAMES = 1024
SEALING_BYTES = 256
_WAKES_READ = 4096
# Plain integers, because combining two of pyzmq's flags costs as much as a send.
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class Hold(Protocol):
    """Handle of memory that was sent. done: ZMQ does not read it any more."""

    @property
    def done(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class NoHold:
    done: bool = True


_NO_HOLD = NoHold()


class Lent:
    """Memory that ZMQ reads. pyzmq refers to the view for as long. Cheaper than its trackers."""

    __slots__ = ("_view",)

    def __init__(self, view: memoryview) -> None:
        """view: must have no reference but that of pyzmq."""
        self._view = ref(view)

    @property
    def done(self) -> bool:
        return self._view() is None


class Port(Protocol):
    """Socket as the ends of a link need it. A dialled port has one peer, b""."""

    def send(self, peer: bytes, head: bytes, payload: memoryview | None = None) -> Hold | None:
        """Hand over a message. Return None, with nothing sent, if that is impossible now."""
        ...

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return the peer and at most three parts of the next message, if there is one."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message, for wake(), or for timeout_s. Return True if there may be a message
        and wake() was not called."""
        ...

    def wake(self) -> None:
        """End the wait that is under way, or else the next one. Any thread may call it."""
        ...

    def reset(self) -> None:
        """Drop the connection and all unsent messages, and dial again."""
        ...

    def close(self) -> None: ...


class ZmqPort:
    """Port with a ZMQ context of its own, and with it the one thread of ZMQ that moves the bytes.
    bind: a ROUTER for many peers; otherwise a DEALER with one. peer_gone_s: after which a
    connection that takes no bytes is cut."""

    def __init__(
        self,
        address: str,
        *,
        bind: bool,
        keys: CurveKeys | None = None,
        identity: bytes = b"",
        peer_gone_s: float = 10.0,
    ) -> None:
        check_address(address, keys, bind=bind)
        self._dialled = None if bind else address
        self._keys, self._identity, self._peer_gone_s = keys, identity, peer_gone_s
        self._context = zmq.Context()
        # Before the socket: libzmq looks for the gatekeeper when the socket is bound.
        self._gate = Gatekeeper(self._context, keys) if bind and keys is not None else None
        self._socket = self._open(zmq.ROUTER if bind else zmq.DEALER)
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._poller = self._watch()
        self.address = address
        try:
            if bind:
                self._socket.bind(address)
                self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            else:
                self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"{address}: {error}") from None

    def send(self, peer: bytes, head: bytes, payload: memoryview | None = None) -> Hold | None:
        socket = self._socket
        try:
            if self._dialled is None:
                socket.send(peer, _NOW_AND_MORE)
            socket.send(head, _NOW if payload is None else _NOW_AND_MORE)
        except zmq.ZMQError as error:
            # The peer is not connected, or its queue is full. No part of the message was sent.
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return None
            raise
        if payload is None:
            return _NO_HOLD
        if len(payload) < COPY_BELOW_BYTES:
            socket.send(payload)
            return _NO_HOLD
        lent = payload[:]
        socket.send(lent, copy=False)
        return Lent(lent)

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        if self._gate is not None:
            self._gate.serve()
        try:
            part = self._socket.recv(_NOW, copy=False)
        except zmq.Again:
            return None
        parts: list[Buffer] = []
        peer = b""
        if self._dialled is None:
            peer = part.bytes
        else:
            parts.append(part.buffer)
        while part.more:
            part = self._socket.recv(copy=False)
            if len(parts) < 3:
                parts.append(part.buffer)
        return peer, parts

    def wait(self, timeout_s: float) -> bool:
        ready = self._poller.poll(max(1, round(timeout_s * 1000)))
        if is_woken := any(source == self._woken.fileno() for source, _ in ready):
            self._woken.recv(_WAKES_READ)
        return bool(ready) and not is_woken

    def wake(self) -> None:
        # If the socket is full, unread wake-ups wait in it, and one more is not needed.
        with suppress(BlockingIOError):
            self._waker.send(b"\0")

    def reset(self) -> None:
        assert self._dialled is not None, "only a connected port can be reset"
        self._socket.close(linger=0)
        self._socket = self._open(zmq.DEALER)
        self._poller = self._watch()
        self._socket.connect(self._dialled)

    def close(self) -> None:
        self._socket.close(linger=0)
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._waker.close()
        self._woken.close()

    def _watch(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        return poller

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MAX_PART_BYTES + SEALING_BYTES
        socket.rcvhwm = MAX_WAITING_FRAMES
        socket.sndhwm = MAX_UNSENT_FRAMES
        socket.copy_threshold = 0
        socket.handshake_ivl = 5000
        gone_ms = round(self._peer_gone_s * 1000)
        socket.heartbeat_ivl = max(1, gone_ms // 4)
        socket.heartbeat_timeout = gone_ms
        # Unlike heartbeats, this also ends connections whose peer has stopped reading.
        socket.setsockopt(zmq.TCP_MAXRT, gone_ms)
        if kind == zmq.ROUTER:
            socket.router_mandatory = True
            # A peer that dials again takes over its old name.
            socket.router_handover = True
        else:
            socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
            socket.immediate = True
            if self._identity:
                socket.setsockopt(zmq.IDENTITY, self._identity)
        if self._keys is not None:
            self._keys.apply(socket, is_server=kind == zmq.ROUTER)
        return socket
