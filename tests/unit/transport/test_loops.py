"""Both ends on their own threads, and the guarantees for the thread that calls them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import monotonic

import msgspec
import numpy as np
import pytest
import torch

from kvspec_testkit.transport.loopback import ANY, DEADLINE_S, FAST
from kvspec_testkit.transport.rig import IDENTITY, Pages
from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport import (
    Arrival,
    LinkState,
    PageArrived,
    Receiver,
    ReceiverLoop,
    SegmentKey,
    SegmentReleased,
    Sender,
    SenderLoop,
    SendEvent,
    Stream,
    StreamArrived,
    Timing,
    TransferEnded,
    TransferFailed,
    TransferOpened,
    TransferShape,
    ZmqPort,
)
from sglang_kvspec.transport import loop as loop_module
from sglang_kvspec.transport.loop import SWITCH_INTERVAL_S, Loop

SHAPE = TransferShape(4, 2, 100_000, 300_000)
SMALL = TransferShape(1, 1, 100, 0)
# Longer than the time limit of a test.
NEVER_S = 3600.0
# With this timing, only calls and messages make anything happen during a test.
SLOW = Timing(heartbeat_s=NEVER_S, probe_s=NEVER_S, silence_s=NEVER_S, gone_s=NEVER_S, retry_s=0.01)


class Pair:
    """A sender loop and a receiver loop, with their events.

    expected: a transfer that the receiver expects before the sender's loop starts.
    """

    def __init__(
        self,
        stack: ExitStack,
        *,
        timing: Timing = FAST,
        codec: str = "log4",
        expected: int | None = None,
    ) -> None:
        self.target = Pages(4, SHAPE, None)
        port = ZmqPort(ANY, bind=True)
        sender = Sender(port, IDENTITY, timing=timing)
        dialled = ZmqPort(port.address, bind=False, identity=b"r")
        identity = msgspec.structs.replace(IDENTITY, codec=codec)
        self.receiver = ReceiverLoop(Receiver(dialled, identity, timing=timing))
        stack.enter_context(self.receiver)
        if expected is not None:
            self.expect(expected)
        self.sender = SenderLoop(sender)
        stack.enter_context(self.sender)
        self.sent: list[SendEvent] = []
        self.arrived: list[Arrival] = []

    def expect(self, transfer: int, shape: TransferShape = SHAPE) -> None:
        pages = self.target.refs(list(range(shape.num_pages)))
        self.receiver.expect(transfer, pages, shape, self.target.memory)

    def offer(self, transfer: int, source: Pages) -> None:
        for stream in Stream:
            for page in range(4):
                for chunk in range(2):
                    key = SegmentKey(transfer, stream, page, chunk)
                    self.sender.offer(key, source.view(stream, page, chunk))

    def until_sent(self, *events: SendEvent) -> None:
        until(self.sender, self.sent, events)

    def until_arrived(self, condition: Callable[[Arrival], bool]) -> None:
        end_s = monotonic() + DEADLINE_S
        while not any(map(condition, self.arrived)):
            assert monotonic() < end_s, self.arrived
            self.arrived += self.receiver.take_events(1.0)

    def until_failed(self, transfer: int) -> str:
        self.until_arrived(lambda e: isinstance(e, TransferFailed) and e.transfer == transfer)
        failed = [e for e in self.arrived if isinstance(e, TransferFailed)]
        assert len(failed) == 1
        return failed[0].reason


def until(loop: Loop[SendEvent], got: list[SendEvent], events: tuple[SendEvent, ...]) -> None:
    end_s = monotonic() + DEADLINE_S
    while not set(events) <= set(got):
        assert monotonic() < end_s, got
        got += loop.take_events(1.0)


def has_all(stream: Stream) -> Callable[[Arrival], bool]:
    return lambda event: isinstance(event, StreamArrived) and event.stream is stream


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    interval_s = sys.getswitchinterval()
    with ExitStack() as stack:
        yield stack
    sys.setswitchinterval(interval_s)


def test_a_transfer_between_two_loops(stack: ExitStack) -> None:
    pair, source = Pair(stack), Pages(4, SHAPE, seed=1)
    pair.expect(7)
    pair.until_sent(TransferOpened(7))
    pair.offer(7, source)
    pair.until_arrived(has_all(Stream.RESIDUAL))
    pair.until_sent(TransferEnded(7, None))
    for stream in Stream:
        for got, sent in zip(pair.target.tensors[stream], source.tensors[stream], strict=True):
            assert torch.equal(got, sent)
    assert len([e for e in pair.arrived if isinstance(e, PageArrived)]) == 8
    assert len([e for e in pair.sent if isinstance(e, SegmentReleased)]) == 16
    assert pair.receiver.state is LinkState.LIVE
    assert pair.receiver.refusal is None
    assert (pair.sender.counters().completed, pair.receiver.counters().completed) == (1, 1)


def test_counters_are_a_copy(stack: ExitStack) -> None:
    pair = Pair(stack)
    before = pair.receiver.counters()
    pair.expect(7)
    pair.offer(7, Pages(4, SHAPE, seed=1))
    pair.until_arrived(has_all(Stream.RESIDUAL))
    assert before.streams[Stream.ANCHOR].payload_bytes == 0
    assert (before.completed, before.to_anchors.count, before.dropped) == (0, 0, {})
    after = pair.receiver.counters()
    assert after.streams[Stream.ANCHOR].payload_bytes == 800_000
    assert after.to_anchors.count == after.to_residuals.count == 1


@pytest.fixture
def _idle_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only calls and messages wake a loop."""
    monkeypatch.setattr(loop_module, "IDLE_S", NEVER_S)


@pytest.mark.usefixtures("_idle_for_ever")
def test_calls_wake_a_loop_that_would_wait_for_ever(stack: ExitStack) -> None:
    pair = Pair(stack, timing=SLOW)
    while pair.receiver.state is not LinkState.LIVE:
        # Each call makes the loop try another Hello, in case the connection is up.
        pair.receiver.cancel(1, "nothing")
        pair.receiver.take_events(0.05)
    pair.expect(7)
    pair.until_sent(TransferOpened(7))
    pair.receiver.cancel(7, "enough")
    pair.until_sent(TransferEnded(7, "enough"))
    assert pair.until_failed(7) == "enough"
    pair.expect(8)
    pair.until_sent(TransferOpened(8))
    pair.sender.abort(8, "not today")
    pair.until_sent(TransferEnded(8, "not today"))
    pair.arrived.clear()
    assert pair.until_failed(8) == "the sender ended the transfer: not today"


@pytest.mark.usefixtures("_idle_for_ever")
def test_closing_a_loop_that_would_wait_for_ever() -> None:
    """close() raises if the thread does not end."""
    port = ZmqPort(ANY, bind=True)
    loop = SenderLoop(Sender(port, IDENTITY, timing=SLOW))
    loop.close()
    loop.close()
    ZmqPort(port.address, bind=True).close()
    for call in (loop.take_events, loop.counters, lambda: loop.abort(1, "no")):
        with pytest.raises(TransportError, match="sender's loop is closed"):
            call()


class Spoiled:
    """A destination that raises."""

    def view(self, stream: Stream, page: int, generation: int, chunk: int) -> memoryview | None:
        raise ZeroDivisionError("a defect of the pool")


def test_an_exception_in_a_loop_is_raised_by_every_call_after_it(stack: ExitStack) -> None:
    pair = Pair(stack)
    receiver = pair.receiver
    pages = [(0, 0)]
    receiver.expect(7, pages, SMALL, Spoiled())
    pair.sender.offer(SegmentKey(7, Stream.ANCHOR, 0, 0), memoryview(bytes(100)))
    with pytest.raises(TransportError, match="a defect of the pool"):
        receiver.take_events(NEVER_S)
    calls: list[Callable[[], object]] = [
        receiver.take_events,
        receiver.counters,
        lambda: receiver.take_events(NEVER_S),
        lambda: receiver.refusal,
        lambda: receiver.state,
        lambda: receiver.expect(8, pages, SMALL, pair.target.memory),
        lambda: receiver.cancel(7, "no"),
        receiver.close,
    ]
    for call in calls:
        with pytest.raises(TransportError, match=r"receiver's loop has failed.*ZeroDivision"):
            call()
    assert not receiver._thread.is_alive()
    # The fixture closes the loop again.
    receiver._error = None


def test_memory_is_kept_until_its_release_has_been_taken(stack: ExitStack) -> None:
    pair = Pair(stack)
    memory = np.full(100, 7, dtype=np.uint8)
    watched = weakref.ref(memory)
    key = SegmentKey(7, Stream.ANCHOR, 0, 0)
    pair.sender.offer(key, memory.data)
    del memory
    pair.expect(7, SMALL)
    pair.until_arrived(has_all(Stream.ANCHOR))
    gc.collect()
    assert watched() is not None
    pair.until_sent(TransferEnded(7, None))
    assert SegmentReleased(key) in pair.sent
    gc.collect()
    assert watched() is None
    assert pair.target.tensors[Stream.ANCHOR][0][0, :100].eq(7).all()


def test_every_offer_is_released_even_if_it_comes_too_late(stack: ExitStack) -> None:
    pair = Pair(stack)
    first, late = (SegmentKey(7, Stream.ANCHOR, 0, chunk) for chunk in range(2))
    pair.sender.offer(first, memoryview(bytes(100)))
    pair.sender.abort(7, "request aborted")
    pair.sender.offer(late, memoryview(bytes(100)))
    pair.until_sent(SegmentReleased(late), TransferEnded(7, "request aborted"))
    assert pair.sent.count(SegmentReleased(first)) == pair.sent.count(SegmentReleased(late)) == 1


def test_an_offer_that_does_not_fit_ends_its_transfer_and_no_other(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.expect(7, SMALL)
    pair.until_sent(TransferOpened(7))
    key = SegmentKey(7, Stream.ANCHOR, 0, 0)
    pair.sender.offer(key, memoryview(bytes(101)))
    reason = f"{key} has 101 bytes, the limit is 100"
    pair.until_sent(SegmentReleased(key), TransferEnded(7, reason))
    assert pair.until_failed(7) == f"the sender ended the transfer: {reason}"
    pair.expect(8, SMALL)
    pair.sender.offer(key._replace(transfer=8), memoryview(bytes(99)))
    pair.until_sent(TransferEnded(8, None))


def test_offers_that_are_mistakes_raise_at_once(stack: ExitStack) -> None:
    pair = Pair(stack)
    key = SegmentKey(7, Stream.ANCHOR, 0, 0)
    pair.sender.offer(key, memoryview(bytes(100)))
    with pytest.raises(TransportError, match="already offered"):
        pair.sender.offer(key, memoryview(bytes(100)))
    with pytest.raises(TransportError, match="no bytes"):
        pair.sender.offer(key._replace(chunk=1), memoryview(b""))
    with pytest.raises(TypeError):
        pair.sender.offer(key._replace(chunk=1), memoryview(bytes(100))[::2])
    pair.expect(7, SMALL)
    pair.until_sent(TransferEnded(7, None))


def test_a_transfer_that_cannot_be_expected_fails(stack: ExitStack) -> None:
    pair = Pair(stack)
    twice = [(1, 1), (1, 1), (2, 2), (3, 3)]
    pair.receiver.expect(7, twice, SHAPE, pair.target.memory)
    assert "needs 4 distinct pages" in pair.until_failed(7)
    pair.arrived.clear()
    pair.expect(8)
    pair.expect(8)
    assert "already expected" in pair.until_failed(8)
    # The loop takes calls in order. Once transfer 9 has failed, no more events of transfer 8
    # follow.
    pair.receiver.expect(9, twice, SHAPE, pair.target.memory)
    pair.until_arrived(lambda event: isinstance(event, TransferFailed) and event.transfer == 9)
    assert [e.transfer for e in pair.arrived if isinstance(e, TransferFailed)] == [8, 9]


def test_a_refusal_reaches_the_thread_that_calls(stack: ExitStack) -> None:
    pair = Pair(stack, codec="uniform4", expected=7)
    assert "--kvspec-codec" in pair.until_failed(7)
    assert pair.receiver.state is LinkState.REFUSED
    assert "--kvspec-codec" in str(pair.receiver.refusal)
    with pytest.raises(HandshakeRefused, match="kvspec-codec"):
        pair.expect(8)


def test_threads_switch_often_while_there_are_loops(stack: ExitStack) -> None:
    Pair(stack)
    assert sys.getswitchinterval() <= SWITCH_INTERVAL_S


def test_a_waiter_for_several_loops_is_woken_when_one_fails(stack: ExitStack) -> None:
    news = threading.Event()
    port = ZmqPort(ANY, bind=True)
    sender = Sender(port, IDENTITY, timing=SLOW)
    stack.callback(port.close)
    loop = SenderLoop(sender, on_news=news.set)
    assert not news.is_set()
    # The failing call gives take_events() no event.
    loop._post(lambda: 1 // 0)
    assert news.wait(DEADLINE_S)
    with pytest.raises(TransportError, match="ZeroDivision"):
        loop.take_events()
