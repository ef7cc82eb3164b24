"""Sender and receiver, each in a process with a core of its own."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvspec_testkit.transport.rig import IDENTITY
from sglang_kvspec.transport import (
    CurveKeys,
    PageMemory,
    Receiver,
    SegmentKey,
    Sender,
    Stream,
    StreamArrived,
    TokenBucket,
    TransferEnded,
    TransferFailed,
    TransferShape,
    ZmqPort,
)
from sglang_kvspec.transport.frames import Data, Identity

# Arrivals are logged as (clock, stream, transfer, bytes); both processes read the same clock.
Log = list[tuple[float, int, int, int]]


@dataclass
class Offers:
    """Transfers to send. at_s[i]: seconds from the start until transfer i is offered. link:
    bytes/s, None for no limit. streams: streams of each transfer; empty for all streams. keys:
    CURVE keys of the sender and the receiver."""

    shape: TransferShape
    at_s: list[float]
    link: float | None = None
    streams: list[tuple[Stream, ...]] = field(default_factory=list)
    keys: tuple[CurveKeys | None, CurveKeys | None] = (None, None)


@dataclass
class SenderReport:
    offered_s: list[float]
    seconds: float
    cpu_s: float
    rss_growth: int
    most_in_flight: list[int]


@dataclass
class ReceiverReport:
    seconds: float
    num_bytes: int
    cpu_s: float
    rss_growth: int
    log: Log


def run_pair(
    send: Callable[..., SenderReport], receive: Callable[..., ReceiverReport], offers: Offers
) -> tuple[SenderReport, ReceiverReport]:
    """Run both ends to completion, each pinned to a core of its own if there are two."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver_ours, receiver_theirs = context.Pipe()
    cores = sorted(os.sched_getaffinity(0))
    sender = context.Process(target=_pinned, args=(cores[0], send, offers, theirs))
    receiver = context.Process(target=_pinned, args=(cores[-1], receive, offers, receiver_theirs))
    sender.start()
    try:
        receiver_ours.send(ours.recv())
        receiver.start()
        received = receiver_ours.recv()
        ours.send("the receiver is done")
        return ours.recv(), received
    finally:
        for process in (sender, receiver):
            process.join(20)
            process.kill()


def _pinned(core: int, end: Callable[..., Any], offers: Offers, pipe: Connection) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    end(offers, pipe)


def send_all(offers: Offers, pipe: Connection) -> None:
    """Offer each transfer when it is due. Every transfer sends from the same pages."""
    port = ZmqPort("tcp://127.0.0.1:0", bind=True, keys=offers.keys[0])
    shape = offers.shape
    link = TokenBucket(offers.link, 256 << 10, time.monotonic()) if offers.link else None
    sender = Sender(port, IDENTITY, link=link)
    memory = page_memory(shape)
    pipe.send(port.address)
    while not sender.peers.live():
        sender.step(0.01)
    rss, cpu_s, start_s = rss_bytes(), time.process_time(), time.monotonic()
    offered_s: list[float] = []
    most = [0, 0]
    ended = 0
    while ended < len(offers.at_s):
        now_s = time.monotonic()
        while len(offered_s) < len(offers.at_s) and (
            now_s - start_s >= offers.at_s[len(offered_s)]
        ):
            transfer = len(offered_s)
            streams = offers.streams[transfer] if offers.streams else tuple(Stream)
            offered_s.append(time.monotonic())
            _offer(sender, memory, shape, transfer, streams)
        ended += sum(isinstance(event, TransferEnded) for event in sender.step(0.01))
        for stream in Stream:
            most[stream] = max(most[stream], sender.scheduler.in_flight(stream))
        if pipe.poll():
            break
    took_s, used_s = time.monotonic() - start_s, time.process_time() - cpu_s
    growth = rss_bytes() - rss
    while not pipe.poll():
        sender.step(0.01)
    pipe.send(SenderReport(offered_s, took_s, used_s, growth, most))
    sender.close()


def receive_all(offers: Offers, pipe: Connection, stall_s: float = 0.0) -> None:
    """Receive every transfer into the same pages. stall_s: seconds to read nothing after the first
    bytes have arrived."""
    port = ZmqPort(pipe.recv(), bind=False, keys=offers.keys[1], identity=b"bench")
    receiver = LoggedReceiver(port, IDENTITY)
    memory = page_memory(offers.shape)
    pages = [(page, 0) for page in range(offers.shape.num_pages)]
    for transfer in range(len(offers.at_s)):
        receiver.expect(transfer, pages, offers.shape, memory)
    missing = {
        (transfer, stream)
        for transfer in range(len(offers.at_s))
        for stream in (offers.streams[transfer] if offers.streams else tuple(Stream))
        if offers.shape.chunk_bytes(stream)
    }
    cpu_s = time.process_time()
    rss = growth = 0
    while missing:
        for event in receiver.step(0.05):
            if isinstance(event, TransferFailed):
                raise RuntimeError(event.reason)
            if isinstance(event, StreamArrived):
                missing.discard((event.transfer, event.stream))
        if receiver.log and not rss:
            rss = rss_bytes()
            end_s = time.monotonic() + stall_s
            while time.monotonic() < end_s:
                time.sleep(0.01)
                growth = max(growth, rss_bytes() - rss)
    used_s = time.process_time() - cpu_s
    seconds = receiver.log[-1][0] - receiver.log[0][0]
    num_bytes = sum(entry[3] for entry in receiver.log)
    log = receiver.log
    pipe.send(ReceiverReport(seconds, num_bytes, used_s, max(growth, rss_bytes() - rss), log))
    receiver.close()


class LoggedReceiver(Receiver):
    """Receiver that logs the arrival of each piece."""

    def __init__(self, port: ZmqPort, identity: Identity) -> None:
        super().__init__(port, identity)
        self.log: Log = []

    def _write(self, frame: Data, payload: Any, now_s: float) -> None:
        self.log.append((now_s, frame.stream, frame.transfer, frame.length))
        super()._write(frame, payload, now_s)


def rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def page_memory(shape: TransferShape) -> PageMemory:
    tensors = [
        [
            torch.ones(shape.num_pages, shape.chunk_bytes(stream), dtype=torch.uint8)
            for _ in range(shape.num_chunks)
        ]
        for stream in Stream
    ]
    return PageMemory(tensors, lambda page, generation: True)


def _offer(
    sender: Sender,
    memory: PageMemory,
    shape: TransferShape,
    transfer: int,
    streams: tuple[Stream, ...],
) -> None:
    for stream in streams:
        for page in range(shape.num_pages):
            for chunk in range(shape.num_chunks):
                view = memory.view(stream, page, 0, chunk)
                assert view is not None
                sender.offer(SegmentKey(transfer, stream, page, chunk), view)
