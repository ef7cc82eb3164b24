"""Opens at a sender: which receiver may have a transfer, which offers fit, how much may be open."""

from __future__ import annotations

import msgspec
import pytest

from kvspec_testkit.transport.network import Faults
from kvspec_testkit.transport.rig import IDENTITY, Rig
from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport import (
    FlightLimits,
    SegmentKey,
    Stream,
    TransferEnded,
    TransferOpened,
)
from sglang_kvspec.transport.frames import Hello, Open
from sglang_kvspec.transport.openings import MAX_UNOFFERED_TRANSFERS
from sglang_kvspec.transport.scheduler import SendScheduler
from sglang_kvspec.transport.wire import encode

LIMITS = FlightLimits(piece_bytes=10, residual_bytes=25, total_bytes=60, frames=8)
CREDIT = 1 << 20


def open_frame(transfer: int, num_pages: int = 2) -> Open:
    pages = tuple((40 + page, transfer) for page in range(num_pages))
    return Open(1, 1, transfer, pages, 1, 23, 57, num_pages)


def offer(scheduler: SendScheduler, transfer: int, stream: Stream, page: int, size: int) -> bool:
    return scheduler.offer(SegmentKey(transfer, stream, page, 0), memoryview(bytes(size)), 0.0)


def test_only_one_receiver_has_a_transfer() -> None:
    scheduler = SendScheduler(LIMITS)
    assert scheduler.open(b"a", open_frame(0)).refusal is None
    assert scheduler.open(b"a", open_frame(0)).refusal is None
    assert "another receiver" in str(scheduler.open(b"b", open_frame(0)).refusal)
    assert "other pages" in str(scheduler.open(b"a", open_frame(0, num_pages=3)).refusal)


def test_open_pages_are_bounded() -> None:
    scheduler = SendScheduler(LIMITS)
    peers = [bytes([number]) for number in range(5)]
    frames = [open_frame(t, num_pages=1 << 15) for t in range(40)]
    refused = [scheduler.open(peers[t // 8], frames[t]).refusal for t in range(40)]
    assert refused[:32] == [None] * 32
    assert "limit" in str(refused[32])
    assert scheduler.abort(3, "over") is not None
    assert scheduler.open(peers[4], open_frame(50, num_pages=1 << 15)).refusal is None


def test_what_one_receiver_opens_without_an_offer_is_bounded() -> None:
    scheduler = SendScheduler(LIMITS)
    refused = [scheduler.open(b"a", open_frame(t, num_pages=1 << 15)).refusal for t in range(9)]
    assert refused[:8] == [None] * 8
    assert "262144 waiting pages" in str(refused[8])
    assert scheduler.open(b"b", open_frame(20, num_pages=1 << 15)).refusal is None
    offer(scheduler, 0, Stream.ANCHOR, 0, 5)
    offer(scheduler, 0, Stream.ANCHOR, 1, 5)
    assert scheduler.open(b"a", open_frame(30, num_pages=1 << 15)).refusal is None
    assert "wait" in str(scheduler.open(b"a", open_frame(31)).refusal)
    for transfer in (0, 1):
        assert scheduler.abort(transfer, "over") is not None
    assert scheduler.open(b"a", open_frame(32, num_pages=1 << 15)).refusal is None
    assert "wait" in str(scheduler.open(b"a", open_frame(33)).refusal)
    offer(scheduler, 34, Stream.ANCHOR, 0, 5)
    assert scheduler.open(b"a", open_frame(34)).refusal is None
    for transfer in (*range(2, 8), 20, 30, 32, 34):
        assert scheduler.abort(transfer, "over") is not None
    assert scheduler.is_idle
    counted = scheduler._openings
    assert (len(counted._unoffered_pages), len(counted._unoffered_transfers)) == (0, 0)


def test_a_flood_of_opens_from_one_receiver_harms_no_other() -> None:
    rig = Rig(0)
    rig.expect(1)
    rig.tick()
    rig.tick()
    flooding = rig.network.port(b"other")
    flooding.send(b"", encode(Hello(5, IDENTITY, CREDIT)))
    rig.tick()
    rig.tick()
    session = rig.sender.peers.session(b"other")
    assert session is not None
    for number in range(MAX_UNOFFERED_TRANSFERS + 500):
        frame = Open(session.session, number + 1, 1000 + number, ((1, 1),), 1, 9, 9, 1)
        flooding.send(b"", encode(frame))
        if number % 50 == 0:
            rig.tick()
    rig.offer(1)
    rig.run(10)
    rig.check_arrived(1)
    opened = [event for event in rig.sent if isinstance(event, TransferOpened)]
    assert len(opened) == 1 + MAX_UNOFFERED_TRANSFERS
    # The flooding receiver falls silent. All transfers that it opened end.
    rig.network.unplug(b"other")
    rig.sources = dict.fromkeys((event.transfer for event in opened), rig.sources[1])
    rig.run(60, tick_s=0.1)
    assert "silent" in str(ended(rig)[1000])
    rig.settle()
    rig.check_nothing_left()


def test_a_sender_is_told_once_that_its_receiver_has_room() -> None:
    rig = Rig(0)
    assert not rig.sender.is_open(1)
    rig.expect(1)
    for _ in range(2000):
        rig.tick()
    # The receiver has repeated its Open by now.
    assert rig.sent == [TransferOpened(1)]
    assert rig.sender.is_open(1)
    rig.offer(1)
    rig.run(10)
    rig.check_complete()
    assert rig.sent.count(TransferOpened(1)) == 1
    assert not rig.sender.is_open(1)


def test_an_open_after_the_offers_is_reported_before_their_end() -> None:
    rig = Rig(0)
    rig.offer(1)
    rig.tick()
    assert rig.sent == []
    assert not rig.sender.is_open(1)
    rig.expect(1)
    rig.run(10)
    assert rig.sent[0] == TransferOpened(1)
    assert rig.sent[-1] == TransferEnded(1, None)


def test_a_refused_open_is_not_reported() -> None:
    rig = Rig(0)
    rig.sender.abort(1, "not wanted")
    rig.expect(1)
    rig.run(1)
    assert rig.failures() == {1: "the sender ended the transfer: not wanted"}
    assert rig.sent == []


def test_a_transfer_that_was_never_offered_ends_when_its_receiver_goes() -> None:
    rig = Rig(0)
    rig.expect(1)
    for _ in range(5):
        rig.tick()
    rig.network.unplug(b"receiver")
    for _ in range(400):
        rig.step_sender()
        rig.clock.now_s += 0.1
    assert "silent" in str(ended(rig)[1])
    assert not rig.sender.is_open(1)
    assert rig.sender.is_idle
    assert not rig.sender._asked._at_s


def test_a_cancellation_that_was_lost_ends_what_was_never_offered() -> None:
    rig = Rig(0)
    rig.expect(1)
    rig.expect(2)
    for _ in range(5):
        rig.tick()
    rig.receiver.cancel(2, "request aborted")
    rig.network.cut()
    for _ in range(1500):
        rig.tick(0.05)
    assert ended(rig) == {2: "the receiver no longer asks for the transfer"}
    assert rig.sender.is_open(1)


@pytest.mark.parametrize("is_offered_first", [False, True])
def test_a_slow_transfer_that_is_asked_for_once_is_not_ended(is_offered_first: bool) -> None:
    rig = Rig(0, link=70.0)
    if is_offered_first:
        rig.offer(1)
    rig.expect(1)
    for _ in range(5):
        rig.tick()
    if not is_offered_first:
        rig.offer(1)
    rig.run(200, tick_s=0.05)
    assert rig.clock() > 190
    rig.check_complete()


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("reason", ["enough: 7 of 9", "", "\u00e9\u4e2d" * 256], ids=len)
def test_the_reason_of_a_cancellation_comes_as_it_is(reason: str, is_lost: bool) -> None:
    rig = Rig(0)
    rig.start(1)
    for _ in range(6):
        rig.tick()
    rig.network.faults = Faults(lose=float(is_lost))
    rig.receiver.cancel(1, reason)
    rig.network.carry()
    rig.network.faults = Faults()
    for _ in range(3):
        rig.tick()
    assert ended(rig) == {1: reason}


def ended(rig: Rig) -> dict[int, str | None]:
    return {e.transfer: e.reason for e in rig.sent if isinstance(e, TransferEnded)}


def test_residuals_of_pages_that_have_none_are_refused() -> None:
    scheduler = SendScheduler(LIMITS)
    frame = msgspec.structs.replace(open_frame(0), num_residual_pages=1)
    assert scheduler.open(b"a", frame).refusal is None
    offer(scheduler, 0, Stream.RESIDUAL, 0, 5)
    offer(scheduler, 0, Stream.ANCHOR, 1, 5)
    with pytest.raises(TransportError, match="outside"):
        offer(scheduler, 0, Stream.RESIDUAL, 1, 5)


@pytest.mark.parametrize(
    ("stream", "page", "size"),
    [(Stream.ANCHOR, 0, 24), (Stream.ANCHOR, 2, 5), (Stream.RESIDUAL, 1, 5)],
)
def test_what_was_offered_before_and_does_not_fit_the_open_ends_the_transfer(
    stream: Stream, page: int, size: int
) -> None:
    scheduler = SendScheduler(LIMITS)
    scheduler.add_peer(b"a", CREDIT)
    offer(scheduler, 1, stream, page, size)
    frame = msgspec.structs.replace(open_frame(1), num_residual_pages=1)
    opening = scheduler.open(b"a", frame)
    assert opening.ended is not None
    assert opening.ended.reason == opening.refusal == scheduler.open(b"a", frame).refusal
    assert [segment.key for segment in opening.ended.segments] == [SegmentKey(1, stream, page, 0)]
    assert scheduler.choose() is None
    assert scheduler.is_idle


@pytest.mark.parametrize("changed", [{"num_residual_pages": 1}, {"anchor_bytes": 24}])
def test_an_open_that_is_repeated_may_not_change(changed: dict[str, int]) -> None:
    scheduler = SendScheduler(LIMITS)
    scheduler.add_peer(b"a", CREDIT)
    assert scheduler.open(b"a", open_frame(0)).refusal is None
    opening = scheduler.open(b"a", msgspec.structs.replace(open_frame(0), **changed))
    assert "other pages" in str(opening.refusal)
    assert opening.ended is None
    offer(scheduler, 0, Stream.RESIDUAL, 1, 5)
    assert scheduler.choose() is not None


def test_an_open_of_more_residual_pages_than_pages_is_refused() -> None:
    scheduler = SendScheduler(LIMITS)
    frame = msgspec.structs.replace(open_frame(0), num_residual_pages=3)
    assert "no transfer can have" in str(scheduler.open(b"a", frame).refusal)
    assert scheduler.is_idle
