"""A sender, a receiver and their pages on an in-memory network."""

from __future__ import annotations

from random import Random

import torch

from kvspec_testkit.transport.network import NO_FAULTS, SENDER, Faults, Network
from sglang_kvspec.transport.arrivals import Arrival, PageArrived, StreamArrived, TransferFailed
from sglang_kvspec.transport.flight import FlightLimits
from sglang_kvspec.transport.frames import PROTOCOL, Identity, Stream
from sglang_kvspec.transport.page_memory import PageMemory
from sglang_kvspec.transport.port import Port
from sglang_kvspec.transport.receiver import Receiver
from sglang_kvspec.transport.segments import SegmentKey, TransferShape
from sglang_kvspec.transport.sender import SegmentReleased, Sender, SendEvent, TransferEnded
from sglang_kvspec.transport.session import Timing
from sglang_kvspec.transport.shaping import TokenBucket

IDENTITY = Identity(
    protocol=PROTOCOL,
    package="0.1.0",
    codec="log4",
    target="exact",
    page_size=64,
    fingerprint="demo-5m",
    whole="all of demo-5m",
    tp_shape=(1, 8),
    rank=0,
)
SMALL = FlightLimits(piece_bytes=100, residual_bytes=400, total_bytes=1600, frames=64)
POISON = 0xA5


class Pages:
    """Pages of one end: `num_chunks` tensors for each stream, and generations. A page's generation
    is its number until the page is recycled."""

    def __init__(self, num_pages: int, shape: TransferShape, seed: int | None) -> None:
        sizes = [shape.chunk_bytes(stream) for stream in Stream]
        random = torch.Generator().manual_seed(seed or 0)
        self.tensors = [
            [
                torch.full((num_pages, size), POISON, dtype=torch.uint8)
                if seed is None
                else torch.randint(0, 256, (num_pages, size), generator=random, dtype=torch.uint8)
                for _ in range(shape.num_chunks if size else 0)
            ]
            for size in sizes
        ]
        self.generations = list(range(num_pages))
        self.memory = PageMemory(self.tensors, lambda page, gen: self.generations[page] == gen)

    def view(self, stream: Stream, page: int, chunk: int) -> memoryview:
        view = self.memory.view(stream, page, self.generations[page], chunk)
        assert view is not None
        return view

    def refs(self, pages: list[int]) -> list[tuple[int, int]]:
        return [(page, self.generations[page]) for page in pages]

    def poison(self, stream: Stream, page: int, chunk: int) -> None:
        """Overwrite the memory of a chunk with POISON, so that a late read is noticed."""
        self.tensors[stream][chunk][page] = POISON


class Rig:
    """Sender and receiver of transfers that move page i to a shuffled page of the receiver. Memory
    is poisoned as soon as the sender releases it. vary: shorten each chunk by its own amount."""

    def __init__(
        self,
        seed: int,
        faults: Faults = NO_FAULTS,
        *,
        shape: TransferShape | None = None,
        limits: FlightLimits = SMALL,
        link: float | None = None,
        vary: bool = False,
    ) -> None:
        self.shape = shape or TransferShape(4, 3, 130, 470)
        self.vary = vary
        self.limits, self.random = limits, Random(seed)
        self.network = Network(seed, faults)
        self.clock = self.network.clock
        self.link = None if link is None else TokenBucket(link, limits.piece_bytes, self.clock())
        self.seed = seed
        self.sources: dict[int, Pages] = {}
        self.targets: dict[int, Pages] = {}
        self.order: dict[int, list[int]] = {}
        self.sent: list[SendEvent] = []
        self.arrived: list[Arrival] = []
        self.sender = self.make_sender()
        self.receiver = self.make_receiver(b"receiver")

    def make_sender(self, port: Port | None = None) -> Sender:
        port = port or self.network.port(SENDER)
        return Sender(
            port,
            IDENTITY,
            limits=self.limits,
            timing=Timing(),
            link=self.link,
            clock=self.clock,
        )

    def make_receiver(self, name: bytes) -> Receiver:
        credit = self.limits.total_bytes
        port = self.network.port(name)
        return Receiver(port, IDENTITY, credit_bytes=credit, timing=Timing(), clock=self.clock)

    def expect(self, transfer: int, timeout_s: float = float("inf")) -> None:
        num_pages = self.shape.num_pages
        order = self.order[transfer] = self.random.sample(range(num_pages + 2), num_pages)
        target = self.targets[transfer] = Pages(num_pages + 2, self.shape, None)
        self.receiver.expect(transfer, target.refs(order), self.shape, target.memory, timeout_s)

    def start(self, *transfers: int) -> None:
        """Expect and offer these transfers."""
        for transfer in transfers:
            self.expect(transfer)
            self.offer(transfer)

    def offer(self, transfer: int, streams: tuple[Stream, ...] = tuple(Stream)) -> None:
        """Offer all of the streams, in a random order of pages and chunks."""
        if transfer not in self.sources:
            self.sources[transfer] = Pages(self.shape.num_pages, self.shape, self.seed + transfer)
        keys = [
            SegmentKey(transfer, stream, page, chunk)
            for stream in streams
            for page in range(self.shape.num_pages_of(stream))
            for chunk in range(self.shape.num_chunks)
        ]
        self.random.shuffle(keys)
        for key in keys:
            view = self.sources[transfer].view(key.stream, key.page_index, key.chunk)
            self.sender.offer(key, view[: self.size_of(key)])

    def size_of(self, key: SegmentKey) -> int:
        """Return the bytes of a chunk, the same for every offer."""
        most = self.shape.chunk_bytes(key.stream)
        spread = 37 * key.page_index + 61 * key.chunk + 13 * key.transfer
        return most - spread % most if self.vary else most

    def run(self, seconds: float, tick_s: float = 0.002) -> None:
        """Let time pass until every transfer is over at both ends, or for `seconds`."""
        end_s = self.clock() + seconds
        while self.clock() < end_s and not self.is_over():
            self.tick(tick_s)

    def tick(self, tick_s: float = 0.002) -> None:
        self.step_sender()
        self.network.carry()
        self.arrived += self.receiver.step()
        self.network.carry()
        self.clock.now_s += tick_s

    def step_sender(self) -> None:
        for event in self.sender.step():
            self.sent.append(event)
            if isinstance(event, SegmentReleased):
                key = event.key
                self.sources[key.transfer].poison(key.stream, key.page_index, key.chunk)

    def is_over(self) -> bool:
        ended = {e.transfer for e in self.sent if isinstance(e, TransferEnded)}
        last = Stream.RESIDUAL if self.shape.num_pages_of(Stream.RESIDUAL) else Stream.ANCHOR
        done = {
            e.transfer
            for e in self.arrived
            if isinstance(e, TransferFailed) or (isinstance(e, StreamArrived) and e.stream is last)
        }
        return ended >= self.sources.keys() and done >= self.targets.keys()

    def failures(self) -> dict[int, str]:
        return {e.transfer: e.reason for e in self.arrived if isinstance(e, TransferFailed)}

    def check_arrived(self, transfer: int) -> None:
        """Assert that every byte is in its place, that no other byte changed, and that each page
        was reported once."""
        source = Pages(self.shape.num_pages, self.shape, self.seed + transfer)
        target, order = self.targets[transfer], self.order[transfer]
        pages = []
        for stream in Stream:
            expected = [torch.full_like(tensor, POISON) for tensor in target.tensors[stream]]
            for index in range(self.shape.num_pages_of(stream)):
                sizes = self._sizes(transfer, stream, index)
                pages.append(PageArrived(transfer, stream, index, sizes))
                for chunk, size in enumerate(sizes):
                    sent = source.tensors[stream][chunk][index, :size]
                    expected[chunk][order[index], :size] = sent
            for chunk, tensor in enumerate(target.tensors[stream]):
                assert torch.equal(tensor, expected[chunk]), (transfer, stream, chunk)
        told = [e for e in self.arrived if isinstance(e, PageArrived) and e.transfer == transfer]
        assert sorted(told, key=lambda e: (e.stream, e.page_index)) == pages

    def _sizes(self, transfer: int, stream: Stream, page_index: int) -> tuple[int, ...]:
        return tuple(
            self.size_of(SegmentKey(transfer, stream, page_index, chunk))
            for chunk in range(self.shape.num_chunks)
        )

    def settle(self) -> None:
        """Run for a second without faults, so that acknowledgements of repeated messages arrive."""
        self.network.faults = NO_FAULTS
        for _ in range(500):
            self.tick()

    def check_complete(self) -> None:
        """Assert that all expected bytes arrived, were written once, and that no end keeps any."""
        assert self.is_over()
        assert self.failures() == {}
        for transfer in self.targets:
            self.check_arrived(transfer)
        self.settle()
        self.check_nothing_left()
        written = self.receiver.counters.streams
        for stream in Stream:
            expected = sum(
                sum(self._sizes(transfer, stream, index))
                for transfer in self.targets
                for index in range(self.shape.num_pages_of(stream))
            )
            assert written[stream].payload_bytes == expected

    def check_nothing_left(self) -> None:
        """Assert that neither end holds memory, bytes in flight or transfers."""
        assert self.sender.is_idle
        assert self.receiver.is_idle
