"""Several links as one: when data has arrived, when a transfer fails, which senders are
notified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import permutations
from time import monotonic

import msgspec
import pytest
import torch

from kvspec_testkit.transport.loopback import ANY, DEADLINE_S, FAST
from kvspec_testkit.transport.rig import IDENTITY, Pages
from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport import (
    JoinedLink,
    LinkState,
    PageArrived,
    Receiver,
    ReceiverLoop,
    SegmentKey,
    Sender,
    SenderLoop,
    Stream,
    StreamArrived,
    TransferEnded,
    TransferFailed,
    TransferOpened,
    TransferShape,
    ZmqPort,
)
from sglang_kvspec.transport.counters import LinkCounters

SHAPE = TransferShape(3, 2, 100_000, 300_000, num_residual_pages=2)


class Senders:
    """Two senders on loopback and the joined link to both. Sender i has chunk i of `source`."""

    def __init__(self, stack: ExitStack, *, ranks: tuple[int, int] = (0, 1)) -> None:
        self.source, self.target = Pages(3, SHAPE, seed=1), Pages(3, SHAPE, None)
        self.loops, receivers = [], []
        for number, rank in enumerate(ranks):
            port = ZmqPort(ANY, bind=True)
            here = msgspec.structs.replace(IDENTITY, tp_shape=(2, 4), rank=number)
            self.loops.append(stack.enter_context(SenderLoop(Sender(port, here, timing=FAST))))
            dialled = ZmqPort(port.address, bind=False, identity=b"r")
            there = msgspec.structs.replace(IDENTITY, tp_shape=(1, 8), rank=rank)
            receivers.append(ReceiverLoop(Receiver(dialled, there, timing=FAST)))
        self.link = JoinedLink(receivers)
        stack.callback(self.link.close)
        self.arrived: list = []

    def expect(self, transfer: int = 7) -> None:
        pages = self.target.refs([2, 0, 1])
        self.link.expect(transfer, pages, SHAPE, self.target.memory, float("inf"))

    def offer(self, sender: int, streams: tuple[Stream, ...] = tuple(Stream)) -> None:
        for stream in streams:
            for index, page in list(enumerate([2, 0, 1]))[: SHAPE.num_pages_of(stream)]:
                view = self.source.view(stream, page, sender)
                self.loops[sender].offer(SegmentKey(7, stream, index, 0), view)

    def until(self, *events: object) -> None:
        end_s = monotonic() + DEADLINE_S
        while not set(events) <= {_place(event) for event in self.arrived}:
            assert monotonic() < end_s, self.arrived
            self.arrived += self.link.take_events()

    def until_ended(self, sender: int) -> str | None:
        end_s = monotonic() + DEADLINE_S
        while monotonic() < end_s:
            for event in self.loops[sender].take_events(0.1):
                if isinstance(event, TransferEnded):
                    return event.reason
        raise AssertionError("the transfer does not end")


def _place(event: object) -> object:
    if isinstance(event, StreamArrived):
        return event.stream
    return event if isinstance(event, TransferFailed) else None


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_every_chunk_comes_from_its_sender(stack: ExitStack) -> None:
    senders = Senders(stack)
    senders.expect()
    senders.offer(0)
    senders.offer(1)
    senders.until(*Stream)
    for stream in Stream:
        pages = slice(None) if stream is Stream.ANCHOR else [0, 2]
        for chunk in (0, 1):
            got, sent = (each.tensors[stream][chunk] for each in (senders.target, senders.source))
            assert torch.equal(got[pages], sent[pages])
    told = [event for event in senders.arrived if isinstance(event, PageArrived)]
    assert {event.chunk_bytes for event in told} == {(100_000,) * 2, (300_000,) * 2}
    assert len(told) == 5
    assert [senders.until_ended(sender) for sender in (0, 1)] == [None, None]
    counters = senders.link.counters()
    assert (counters.completed, counters.failed, counters.sessions) == (2, 0, 2)
    assert counters.streams[Stream.ANCHOR].payload_bytes == 600_000
    assert counters.to_residuals.count == 2
    senders.expect()


def test_a_sender_that_gives_up_ends_all(stack: ExitStack) -> None:
    senders = Senders(stack)
    senders.expect()
    assert TransferOpened(7) in senders.loops[0].take_events(DEADLINE_S)
    senders.offer(0, (Stream.ANCHOR,))
    senders.loops[1].abort(7, "its KV was freed")
    senders.until(TransferFailed(7, "the sender ended the transfer: its KV was freed"))
    reason = senders.until_ended(0)
    assert reason == (
        "another part of the transfer failed: the sender ended the transfer: its KV was freed"
    )
    senders.expect()


def test_a_cancellation_reaches_all_senders(stack: ExitStack) -> None:
    senders = Senders(stack)
    senders.expect()
    senders.offer(0, (Stream.ANCHOR,))
    senders.offer(1, (Stream.ANCHOR,))
    senders.until(Stream.ANCHOR)
    senders.link.cancel(7, "no longer wanted")
    senders.until(TransferFailed(7, "no longer wanted"))
    assert [senders.until_ended(sender) for sender in (0, 1)] == ["no longer wanted"] * 2


def test_one_refusal_refuses_all(stack: ExitStack) -> None:
    senders = Senders(stack, ranks=(0, 3))
    end_s = monotonic() + DEADLINE_S
    while senders.link.state is not LinkState.REFUSED:
        assert monotonic() < end_s
    with pytest.raises(HandshakeRefused, match="sender has 1, receiver 3"):
        senders.expect()


class Scripted:
    """A link whose events the test sets."""

    def __init__(self) -> None:
        self.inbox: list = []
        self.cancelled: list[str] = []
        self.refusal: str | None = None
        self.state = LinkState.LIVE
        self.refuses = self.is_over = self.is_closed = False

    def expect(self, transfer, pages, shape, destination, timeout_s) -> None:
        assert shape.num_chunks == 1
        if self.refuses:
            raise HandshakeRefused("model must be the same")

    def cancel(self, transfer: int, reason: str) -> None:
        self.cancelled.append(reason)

    def take_events(self) -> list:
        if self.is_over:
            raise TransportError("the receiver's loop has failed")
        taken, self.inbox = self.inbox, []
        return taken

    def counters(self) -> LinkCounters:
        return LinkCounters()

    def close(self) -> None:
        self.is_closed = True
        if self.is_over:
            raise TransportError("the receiver's loop has failed")


ONE_PAGE = TransferShape(1, 2, 100, 100)
HALF = (
    PageArrived(7, Stream.ANCHOR, 0, (60,)),
    StreamArrived(7, Stream.ANCHOR, 1.0),
    PageArrived(7, Stream.RESIDUAL, 0, (70,)),
    StreamArrived(7, Stream.RESIDUAL, 2.0),
)


def scripted() -> tuple[Scripted, Scripted, JoinedLink]:
    links = Scripted(), Scripted()
    return (*links, JoinedLink(links))


def expect(link: JoinedLink) -> None:
    link.expect(7, [(0, 0)], ONE_PAGE, None, 60.0)


# All interleavings of the two halves' events. `order` says whose event is next.
@pytest.mark.parametrize("order", sorted(set(permutations((0,) * 4 + (1,) * 4))))
def test_a_transfer_is_complete_once_both_halves_are_in_any_order(order: tuple[int, ...]) -> None:
    *links, joined = scripted()
    expect(joined)
    told, at = [], [0, 0]
    for which in order:
        links[which].inbox.append(HALF[at[which]])
        at[which] += 1
        for event in joined.take_events():
            assert all(HALF.index(_half(event)) < num_told for num_told in at)
            told.append(event)
    assert [_half(event) for event in told] == list(HALF)
    expect(joined)


def _half(event: PageArrived | StreamArrived) -> PageArrived | StreamArrived:
    if isinstance(event, StreamArrived):
        return event
    assert len(set(event.chunk_bytes)) == 1
    return PageArrived(event.transfer, event.stream, event.page_index, event.chunk_bytes[:1])


@pytest.mark.parametrize("num_had", range(5))
def test_a_failure_is_reported_once_nothing_is_under_way(num_had: int) -> None:
    first, second, joined = scripted()
    expect(joined)
    first.inbox += HALF[:num_had]
    second.inbox.append(TransferFailed(7, "the sender was silent"))
    told = joined.take_events()
    if num_had == 4:
        assert told == [TransferFailed(7, "the sender was silent")]
        assert first.cancelled == second.cancelled == []
        return
    assert told == []
    assert first.cancelled == ["another part of the transfer failed: the sender was silent"]
    assert second.cancelled == []
    with pytest.raises(TransportError, match="already expected"):
        expect(joined)
    # The first half may have been complete by then, or not.
    ends = [HALF[num_had:], [TransferFailed(7, "as it was told")]]
    first.inbox += ends[num_had % 2]
    assert joined.take_events() == [TransferFailed(7, "the sender was silent")]
    expect(joined)


def test_a_link_that_refuses_in_the_last_moment_fails_all() -> None:
    first, second, joined = scripted()
    second.refuses = True
    expect(joined)
    assert first.cancelled == ["another part of the transfer failed: model must be the same"]
    assert joined.take_events() == []
    first.inbox.append(TransferFailed(7, "as it was told"))
    assert joined.take_events() == [TransferFailed(7, "model must be the same")]


def test_a_link_that_ended_ends_all() -> None:
    first, second, joined = scripted()
    first.is_over = True
    with pytest.raises(TransportError, match="has failed"):
        joined.take_events()
    with pytest.raises(TransportError, match="has failed"):
        joined.close()
    assert second.is_closed


def test_a_joined_link_is_live_once_all_links_are() -> None:
    first, second, joined = scripted()
    for states, state in (
        ((LinkState.LIVE, LinkState.LIVE), LinkState.LIVE),
        ((LinkState.LIVE, LinkState.GREETING), LinkState.GREETING),
        ((LinkState.GREETING, LinkState.REFUSED), LinkState.REFUSED),
    ):
        first.state, second.state = states
        assert joined.state is state
    assert joined.refusal is None
    second.refusal = "model must be the same"
    assert joined.refusal == "model must be the same"
