"""A link to several receivers of a transfer: which events occur when, and for which receiver."""

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
from sglang_kvspec.transport import (
    ForkedLink,
    Receiver,
    ReceiverLoop,
    SegmentKey,
    SegmentReleased,
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
from sglang_kvspec.transport.segments import Part, number_of, on_the_wire, part_of

SHAPE = TransferShape(3, 1, 100_000, 300_000)
LARGEST = (1 << 63) - 1


@pytest.mark.parametrize("transfer", [0, 1, 7, LARGEST])
@pytest.mark.parametrize("part", [Part(0, 1), Part(0, 2), Part(1, 2), Part(127, 128)])
def test_numbers_name_transfer_and_part(transfer: int, part: Part) -> None:
    number = number_of(transfer, part)
    assert (on_the_wire(number), part_of(number)) == (transfer, part)
    assert (number == transfer) is (part.total == 1)


class Receivers:
    """Two receivers on loopback and the forked link to both. Receiver i gets chunk i of
    `source`."""

    def __init__(self, stack: ExitStack, parts: tuple[tuple[int, int], ...]) -> None:
        self.source = Pages(3, TransferShape(3, 2, 100_000, 300_000), seed=1)
        port = ZmqPort(ANY, bind=True)
        self.loop = stack.enter_context(SenderLoop(Sender(port, IDENTITY, timing=FAST)))
        self.link = ForkedLink(self.loop, harmless=["enough"])
        self.targets = [Pages(3, SHAPE, None) for _ in parts]
        self.receivers = []
        for name, part in zip((b"a", b"b"), parts, strict=True):
            dialled = ZmqPort(port.address, bind=False, identity=name)
            shape = (part[1], 8 // part[1])
            there = msgspec.structs.replace(IDENTITY, tp_shape=shape, part=part)
            receiver = ReceiverLoop(Receiver(dialled, there, timing=FAST))
            self.receivers.append(stack.enter_context(receiver))
        self.sent: list = []

    def expect(self, which: int) -> None:
        target = self.targets[which]
        self.receivers[which].expect(7, target.refs([2, 0, 1]), SHAPE, target.memory)

    def offer(self, chunk: int) -> None:
        for stream in Stream:
            for index, page in enumerate([2, 0, 1]):
                view = self.source.view(stream, page, chunk)
                self.link.offer(SegmentKey(7, stream, index, chunk), view)

    def until_sent(self, event: object) -> None:
        end_s = monotonic() + DEADLINE_S
        while event not in self.sent:
            assert monotonic() < end_s, self.sent
            self.sent += self.link.take_events()

    def until_over(self, which: int) -> str | None:
        """Wait for the end of the transfer. Return the reason if it failed."""
        end_s = monotonic() + DEADLINE_S
        while monotonic() < end_s:
            for event in self.receivers[which].take_events(0.1):
                if isinstance(event, TransferFailed):
                    return event.reason
                if isinstance(event, StreamArrived) and event.stream is Stream.RESIDUAL:
                    return None
        raise AssertionError("the transfer does not end")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def two(stack: ExitStack) -> Receivers:
    return Receivers(stack, ((0, 2), (1, 2)))


def test_every_chunk_goes_to_its_receiver(two: Receivers) -> None:
    for which in (1, 0):
        two.expect(which)
    two.until_sent(TransferOpened(7, 2))
    for which in (0, 1):
        two.offer(which)
    two.until_sent(TransferEnded(7, None))
    for which, target in enumerate(two.targets):
        assert two.until_over(which) is None
        for stream in Stream:
            (got,) = target.tensors[stream]
            assert torch.equal(got, two.source.tensors[stream][which])
    released = [event.key for event in two.sent if isinstance(event, SegmentReleased)]
    assert len(released) == len(set(released)) == 12
    assert {key.transfer for key in released} == {7}


def test_a_receiver_that_gives_up_ends_the_others(two: Receivers) -> None:
    for which in (0, 1):
        two.expect(which)
    two.until_sent(TransferOpened(7, 2))
    two.receivers[1].cancel(7, "out of memory")
    two.until_sent(TransferEnded(7, "out of memory"))
    assert (
        two.until_over(0)
        == "the sender ended the transfer: another part of the transfer failed: out of memory"
    )


def test_a_receiver_that_needs_no_more_ends_no_other(two: Receivers) -> None:
    for which in (0, 1):
        two.expect(which)
    two.until_sent(TransferOpened(7, 2))
    two.receivers[1].cancel(7, "enough")
    assert two.until_over(1) == "enough"
    for which in (0, 1):
        two.offer(which)
    two.until_sent(TransferEnded(7, None))
    assert two.until_over(0) is None


def test_a_transfer_that_was_aborted_before_any_open(two: Receivers) -> None:
    two.link.abort(7, "its KV was freed")
    for which in (0, 1):
        two.expect(which)
    end_s = monotonic() + DEADLINE_S
    while two.loop.counters().failed != 2:
        assert monotonic() < end_s
        two.sent += two.link.take_events()
    reasons = [two.until_over(which) for which in (0, 1)]
    assert reasons == ["the sender ended the transfer: its KV was freed"] * 2
    assert not any(isinstance(event, TransferOpened) for event in two.sent)


def test_a_receiver_with_another_number_of_parts_is_refused(stack: ExitStack) -> None:
    receivers = Receivers(stack, ((0, 1), (1, 2)))
    receivers.expect(0)
    receivers.until_sent(TransferOpened(7, 1))
    receivers.expect(1)
    end_s = monotonic() + DEADLINE_S
    while not receivers.loop.counters().failed:
        assert monotonic() < end_s
        receivers.sent += receivers.link.take_events()
    assert "another number of parts" in str(receivers.until_over(1))
    receivers.offer(0)
    receivers.until_sent(TransferEnded(7, None))


class Scripted:
    """A link whose events the test sets."""

    def __init__(self) -> None:
        self.inbox: list = []
        self.aborted: list[tuple[int, str]] = []
        self.offered: list[SegmentKey] = []

    def offer(self, key: SegmentKey, memory: memoryview) -> None:
        self.offered.append(key)

    def abort(self, transfer: int, reason: str) -> None:
        self.aborted.append((transfer, reason))

    def take_events(self) -> list:
        taken, self.inbox = self.inbox, []
        return taken


ONE, OTHER = number_of(7, Part(0, 2)), number_of(7, Part(1, 2))
EVENTS = {number: [TransferOpened(number), TransferEnded(number, None)] for number in (ONE, OTHER)}


# All interleavings of the two receivers' events. `order` says whose event is next.
@pytest.mark.parametrize("order", sorted(set(permutations((ONE, OTHER) * 2))))
@pytest.mark.parametrize("failing", [(), (ONE,), (OTHER,), (ONE, OTHER)])
def test_a_transfer_ends_once_all_receivers_have_ended_it_in_any_order(
    failing: tuple[int, ...], order: tuple[int, ...]
) -> None:
    """A receiver that opens a transfer which another one has ended is refused or ends it, too."""
    link = Scripted()
    forked = ForkedLink(link, harmless=["enough"])
    left = {number: list(events) for number, events in EVENTS.items()}
    told = []
    for number in order:
        event = left[number].pop(0)
        if isinstance(event, TransferEnded) and number in failing:
            event = TransferEnded(number, "lost")
        link.inbox.append(event)
        told += forked.take_events()
        is_late = isinstance(event, TransferOpened) and "lost" in str(link.aborted)
        assert not is_late or link.aborted[-1] == (
            number,
            "another part of the transfer failed: lost",
        )
    opened = [event for event in told if isinstance(event, TransferOpened)]
    assert opened == [TransferOpened(7, 2)] * (order[0] != order[1])
    ended = [event for event in told if isinstance(event, TransferEnded)]
    assert ended
    assert bool(failing) is any(event.reason == "lost" for event in ended)
    assert not forked._transfers, "something is left"


def test_a_transfer_of_one_part_is_passed_on_unchanged() -> None:
    link = Scripted()
    forked = ForkedLink(link)
    key = SegmentKey(7, Stream.ANCHOR, 0, 0)
    forked.offer(key, memoryview(b"x"))
    link.inbox += [TransferOpened(7), SegmentReleased(key), TransferEnded(7, "lost")]
    assert link.offered == [key]
    assert forked.take_events() == [
        TransferOpened(7, 1),
        SegmentReleased(key),
        TransferEnded(7, "lost"),
    ]
    forked.abort(8, "given up")
    assert link.aborted == [(8, "given up")]
    assert not forked._transfers


@pytest.mark.parametrize("num_opened", [1, 2])
def test_an_abort_ends_all_parts(num_opened: int) -> None:
    link = Scripted()
    forked = ForkedLink(link)
    link.inbox += [TransferOpened(number) for number in (ONE, OTHER)[:num_opened]]
    forked.take_events()
    forked.abort(7, "given up")
    assert link.aborted == [(ONE, "given up"), (OTHER, "given up")]
    # The second receiver's Open may already have been on its way.
    link.inbox += [TransferOpened(OTHER)] * (2 - num_opened)
    link.inbox += [TransferEnded(OTHER, "given up"), TransferEnded(ONE, "given up")]
    assert forked.take_events() == [TransferEnded(7, "given up")]
    assert not forked._transfers
