"""Both ends on threads of their own, alone or with a neighbour thread that computes or spins."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Event, Thread

import torch

from kvspec_testkit.transport.rig import IDENTITY
from sglang_kvspec.transport import (
    Receiver,
    ReceiverLoop,
    SegmentKey,
    Sender,
    SenderLoop,
    Stream,
    StreamArrived,
    TransferEnded,
    TransferFailed,
    ZmqPort,
)
from transfer.ends import Offers, ReceiverReport, SenderReport, page_memory, rss_bytes


def compute(is_over: Event) -> None:
    """Compute as a forward does: torch holds the core, mostly without the GIL."""
    matrix = torch.ones(256, 256)
    while not is_over.is_set():
        matrix = (matrix @ matrix).clamp_(0, 1)


def spin(is_over: Event) -> None:
    """Run the worst neighbour: Python code that never releases the GIL by itself."""
    number = 0
    while not is_over.is_set():
        for _ in range(1000):
            number = number * 3 % 1_000_003


NEIGHBOURS: dict[str, Callable[[Event], None] | None] = {
    "idle": None,
    "computing": compute,
    "spinning": spin,
}


class Neighbour:
    """Thread that shares the loop's process while the loop is measured."""

    def __init__(self, name: str) -> None:
        self._is_over = Event()
        body = NEIGHBOURS[name]
        self._thread = Thread(target=body, args=(self._is_over,)) if body else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()


def send_by_loop(offers: Offers, pipe: Connection, neighbour: str) -> None:
    """Offer every transfer at once."""
    port = ZmqPort("tcp://127.0.0.1:0", bind=True)
    shape, memory = offers.shape, page_memory(offers.shape)
    pipe.send(port.address)
    with SenderLoop(Sender(port, IDENTITY)) as loop, Neighbour(neighbour):
        start_s, cpu_s = time.monotonic(), time.process_time()
        for transfer in range(len(offers.at_s)):
            for stream in Stream:
                for page in range(shape.num_pages):
                    for chunk in range(shape.num_chunks):
                        view = memory.view(stream, page, 0, chunk)
                        assert view is not None
                        loop.offer(SegmentKey(transfer, stream, page, chunk), view)
        ended = 0
        while ended < len(offers.at_s):
            ended += sum(isinstance(event, TransferEnded) for event in loop.take_events(1.0))
        took_s, used_s = time.monotonic() - start_s, time.process_time() - cpu_s
    pipe.recv()
    pipe.send(SenderReport([], took_s, used_s, 0, []))


def receive_by_loop(offers: Offers, pipe: Connection, neighbour: str) -> None:
    """Receive all transfers. Measure from the first payload bytes to the event of the last
    stream."""
    port = ZmqPort(pipe.recv(), bind=False, identity=b"bench")
    memory, shape = page_memory(offers.shape), offers.shape
    pages = [(page, 0) for page in range(shape.num_pages)]
    left = 2 * len(offers.at_s)
    with ReceiverLoop(Receiver(port, IDENTITY)) as loop, Neighbour(neighbour):
        rss, cpu_s = rss_bytes(), time.process_time()
        for transfer in range(len(offers.at_s)):
            loop.expect(transfer, pages, shape, memory)
        start_s = 0.0
        first = 0
        while left:
            for event in loop.take_events(1.0):
                if isinstance(event, TransferFailed):
                    raise RuntimeError(event.reason)
                left -= isinstance(event, StreamArrived)
            if not start_s:
                counters = loop.counters()
                first = sum(c.payload_bytes for c in counters.streams.values())
                start_s = time.monotonic() if first else 0.0
        seconds, used_s = time.monotonic() - start_s, time.process_time() - cpu_s
        counters = loop.counters()
    num_bytes = sum(c.payload_bytes for c in counters.streams.values()) - first
    pipe.send(ReceiverReport(seconds, num_bytes, used_s, rss_bytes() - rss, []))
