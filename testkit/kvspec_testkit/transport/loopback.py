"""A sender and a receiver on real sockets of the loopback interface, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import torch

from kvspec_testkit.transport.proxy import Proxy
from kvspec_testkit.transport.rig import IDENTITY, Pages
from sglang_kvspec.transport.arrivals import Arrival, PageArrived, StreamArrived, TransferFailed
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.keys import CurveKeys
from sglang_kvspec.transport.port import ZmqPort
from sglang_kvspec.transport.receiver import Receiver
from sglang_kvspec.transport.segments import SegmentKey, TransferShape
from sglang_kvspec.transport.sender import Sender, SendEvent, TransferEnded
from sglang_kvspec.transport.session import Timing

ANY = "tcp://127.0.0.1:0"
FAST = Timing(heartbeat_s=0.05, probe_s=0.02, silence_s=0.4, gone_s=2.0, retry_s=0.05)
SHAPE = TransferShape(num_pages=4, num_chunks=2, anchor_bytes=300_000, residual_bytes=1_100_000)
ORDER = [3, 0, 4, 1]
DEADLINE_S = 20.0


class LoopbackLink:
    """A sender and, after dial(), a receiver, with one transfer between their own pages."""

    def __init__(self) -> None:
        self.source = Pages(4, SHAPE, seed=1)
        self.target = Pages(5, SHAPE, None)
        self.sent: list[SendEvent] = []
        self.arrived: list[Arrival] = []
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        self.closers: list[Callable[[], None]] = []

    def listen(self, address: str = ANY, keys: CurveKeys | None = None) -> str:
        port = ZmqPort(address, bind=True, keys=keys, peer_gone_s=2.0)
        self.sender = Sender(port, IDENTITY, timing=FAST)
        self.closers.append(self.sender.close)
        return port.address

    def dial(self, address: str, keys: CurveKeys | None = None) -> None:
        port = ZmqPort(address, bind=False, keys=keys, identity=b"r", peer_gone_s=2.0)
        self.receiver = Receiver(port, IDENTITY, timing=FAST)
        self.closers.append(self.receiver.close)

    def proxy(self, target: str, *, damage_every: int = 0) -> Proxy:
        proxy = Proxy(target, damage_every=damage_every)
        self.closers.append(proxy.close)
        return proxy

    def start(self) -> None:
        assert self.receiver is not None
        self.receiver.expect(1, self.target.refs(ORDER), SHAPE, self.target.memory)
        self.offer()

    def offer(self) -> None:
        assert self.sender is not None
        for stream in Stream:
            for page in range(4):
                for chunk in range(2):
                    view = self.source.view(stream, page, chunk)
                    self.sender.offer(SegmentKey(1, stream, page, chunk), view)

    def turn(self) -> None:
        if self.sender is not None:
            self.sent += self.sender.step(0.002)
        if self.receiver is not None:
            self.arrived += self.receiver.step(0.002)

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = monotonic() + DEADLINE_S
        while not condition():
            assert monotonic() < end_s, (self.sent, self.arrived)
            self.turn()

    def complete(self) -> None:
        """Run until both ends are done. Assert that all bytes arrived and no memory is held."""
        self.until(lambda: self.has_ended(None) and self.has_all(Stream.RESIDUAL))
        for stream in Stream:
            for chunk, tensor in enumerate(self.source.tensors[stream]):
                assert torch.equal(self.target.tensors[stream][chunk][ORDER], tensor)
        assert self.sender is not None
        assert self.receiver is not None
        self.until(lambda: self.sender is not None and self.sender.is_idle)
        assert self.receiver.is_idle
        pages = [e for e in self.arrived if isinstance(e, PageArrived)]
        assert len(pages) == len(set(pages)) == 8

    def has_ended(self, reason: str | None) -> bool:
        ended = [e.reason for e in self.sent if isinstance(e, TransferEnded)]
        return any(r == reason or (reason is not None and reason in str(r)) for r in ended)

    def has_all(self, stream: Stream) -> bool:
        return any(isinstance(e, StreamArrived) and e.stream is stream for e in self.arrived)

    def has_failed(self, reason: str) -> bool:
        return any(isinstance(e, TransferFailed) and reason in e.reason for e in self.arrived)

    def received_bytes(self) -> int:
        assert self.receiver is not None
        return sum(c.payload_bytes for c in self.receiver.counters.streams.values())

    def close_sender(self) -> None:
        assert self.sender is not None
        self.closers.remove(self.sender.close)
        self.sender.close()
        self.sender = None

    def close_receiver(self) -> None:
        assert self.receiver is not None
        self.closers.remove(self.receiver.close)
        self.receiver.close()
        self.receiver = None

    def close(self) -> None:
        for close in reversed(self.closers):
            close()
