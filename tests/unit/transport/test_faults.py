"""Whole transfers on a network in memory that loses, repeats, delays and damages frames, and
breaks.

Released memory of the sender is poisoned at once, so that a later use shows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvspec_testkit.transport.network import SENDER, Faults
from kvspec_testkit.transport.rig import SMALL, Pages, Rig
from sglang_kvspec.transport import SegmentKey, Stream, StreamArrived, TransferEnded, TransferShape

TRANSFERS = (1, 2, 3)
FAULTS = {
    "none": Faults(),
    "one in a hundred damaged": Faults(damage=0.01),
    "lost": Faults(lose=0.1),
    "twice": Faults(repeat=0.3),
    "out of order": Faults(delay=0.5),
    "everything": Faults(0.05, 0.1, 0.2, 0.05),
}


def started(rig: Rig) -> Rig:
    rig.start(*TRANSFERS)
    return rig


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_transfers_are_complete_whatever_the_network_does(faults: Faults, seed: int) -> None:
    rig = started(Rig(seed, faults, vary=seed > 0))
    rig.run(60)
    assert (rig.network.num_faults > 0) == (faults != Faults())
    rig.check_complete()


@pytest.mark.parametrize(
    "shape",
    [
        TransferShape(1, 1, 1, 0),
        TransferShape(1, 1, 1, 1),
        TransferShape(3, 2, 100, 300),
        TransferShape(2, 1, 101, 0),
        TransferShape(3, 2, 100, 300, num_residual_pages=2),
        TransferShape(3, 2, 100, 300, num_residual_pages=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", [False, True])
def test_awkward_shapes(shape: TransferShape, vary: bool) -> None:
    rig = started(Rig(0, shape=shape, vary=vary))
    rig.run(10)
    rig.check_complete()


def test_pieces_that_were_not_lost_are_not_sent_again() -> None:
    rig = started(Rig(0))
    rig.run(10)
    rig.check_complete()
    assert all(c.resent_bytes == 0 for c in rig.sender.counters.streams.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_connection_that_breaks_again_and_again(seed: int) -> None:
    rig = started(Rig(seed, vary=seed > 1))
    for _ in range(6):
        for _ in range(rig.random.randint(2, 6)):
            rig.tick()
        rig.step_sender()
        rig.network.cut()
    rig.run(30)
    rig.check_complete()
    assert sum(c.resent_bytes for c in rig.sender.counters.streams.values())


def test_residuals_behind_every_anchor() -> None:
    rig = Rig(0, link=50_000.0)
    for transfer in TRANSFERS:
        rig.expect(transfer)
        rig.offer(transfer)
    rig.run(30)
    arrived = [e for e in rig.arrived if isinstance(e, StreamArrived)]
    assert [e.stream for e in arrived] == [Stream.ANCHOR] * 3 + [Stream.RESIDUAL] * 3
    assert [e.transfer for e in arrived[:3]] == list(TRANSFERS)
    total = sum(rig.shape.num_segments(s) * rig.shape.chunk_bytes(s) for s in Stream) * 3
    assert arrived[-1].after_s == pytest.approx(total / 50_000, rel=0.1)
    assert rig.sender.counters.link_use(rig.clock()) > 0.9
    rig.check_complete()


def test_anchors_that_come_later_wait_for_no_more_than_what_is_under_way() -> None:
    rig = Rig(0)
    rig.expect(1)
    rig.expect(2)
    rig.offer(1, (Stream.RESIDUAL,))
    for _ in range(5):
        rig.tick()
    flying = rig.sender.scheduler.in_flight(Stream.RESIDUAL)
    before = rig.receiver.counters.streams[Stream.RESIDUAL].payload_bytes
    rig.offer(2, (Stream.ANCHOR,))
    while not rig.receiver.counters.streams[Stream.ANCHOR].payload_bytes:
        rig.tick()
    behind = rig.receiver.counters.streams[Stream.RESIDUAL].payload_bytes - before
    assert 0 < flying <= SMALL.residual_bytes
    assert behind <= SMALL.residual_bytes


def test_a_receiver_that_stalls_holds_back_the_sender_and_comes_back() -> None:
    rig = started(Rig(0))
    for _ in range(6):
        rig.tick()
    inbox = rig.network.ports[b"receiver"].inbox
    most = 0
    for _ in range(2000):
        rig.step_sender()
        rig.network.carry()
        rig.clock.now_s += 0.005
        most = max(most, sum(len(part) for _, parts in inbox for part in parts))
    assert SMALL.total_bytes // 2 < most < 4 * SMALL.total_bytes
    assert rig.sender.counters.lost_sessions == 1
    rig.run(20)
    rig.check_complete()


def test_credit_stops_a_sender_and_lets_it_continue() -> None:
    rig = started(Rig(0))
    for _ in range(6):
        rig.tick()
    rig.receiver.grant(0)
    for _ in range(3):
        rig.tick()
    written = rig.receiver.counters.streams[Stream.ANCHOR].payload_bytes
    for _ in range(3000):
        rig.tick()
    assert rig.receiver.counters.streams[Stream.ANCHOR].payload_bytes == written
    assert not rig.is_over()
    rig.receiver.grant(SMALL.total_bytes)
    rig.run(10)
    rig.check_complete()


def test_a_receiver_that_restarts_fails_its_transfers_at_the_sender() -> None:
    rig = started(Rig(0))
    for _ in range(10):
        rig.tick()
    rig.network.unplug(b"receiver")
    rig.receiver = rig.make_receiver(b"another")
    rig.targets.clear()
    rig.expect(4)
    rig.offer(4)
    rig.run(60)
    ended = {e.transfer: e.reason for e in rig.sent if isinstance(e, TransferEnded)}
    assert ended[4] is None
    rig.check_arrived(4)
    assert all("silent" in str(ended[transfer]) for transfer in TRANSFERS)
    rig.check_nothing_left()


def test_a_restarted_sender_continues_with_what_it_offers_again() -> None:
    rig = started(Rig(0))
    for _ in range(10):
        rig.tick()
    rig.network.unplug(SENDER)
    for _ in range(100):
        rig.arrived += rig.receiver.step()
        rig.clock.now_s += 0.01
    rig.sender = rig.make_sender()
    rig.sources.clear()
    for transfer in TRANSFERS:
        rig.offer(transfer)
    rig.run(60)
    rig.check_complete()
    assert rig.receiver.counters.sessions == 2


def test_a_sender_that_never_comes_back_fails_transfers_with_a_reason() -> None:
    rig = started(Rig(0))
    for _ in range(10):
        rig.tick()
    rig.network.unplug(SENDER)
    for _ in range(4000):
        rig.arrived += rig.receiver.step()
        rig.clock.now_s += 0.01
    assert set(rig.failures()) == set(TRANSFERS)
    assert "silent for 30" in rig.failures()[1]
    assert rig.receiver.is_idle


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_an_abort_ends_a_transfer_at_both_ends_and_frees_its_memory(by: str) -> None:
    rig = started(Rig(0, Faults(lose=0.2)))
    for _ in range(6):
        rig.tick()
    if by == "sender":
        rig.sender.abort(2, "request aborted")
    else:
        rig.receiver.cancel(2, "request aborted")
    before = [t.clone() for stream in rig.targets[2].tensors for t in stream]
    after_cancel = by == "receiver"
    rig.run(60)
    assert "request aborted" in rig.failures()[2]
    ended = {e.transfer: e.reason for e in rig.sent if isinstance(e, TransferEnded)}
    assert ended[1] is None
    assert ended[3] is None
    assert ended[2] is not None
    if after_cancel:
        after = [t for stream in rig.targets[2].tensors for t in stream]
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
    rig.settle()
    rig.check_nothing_left()
    assert not rig.sender.offer(SegmentKey(2, Stream.ANCHOR, 0, 0), memoryview(b"late"))


def test_a_transfer_that_takes_too_long_is_aborted() -> None:
    rig = Rig(0)
    target = Pages(4, rig.shape, None)
    pages = target.refs([0, 1, 2, 3])
    rig.receiver.expect(1, pages, rig.shape, target.memory, timeout_s=5.0)
    rig.targets[1] = target
    rig.run(20)
    assert "longer than" in rig.failures()[1]
    assert rig.clock() == pytest.approx(105, abs=0.1)


def test_limits_of_the_sender_narrow_what_a_receiver_grants() -> None:
    rig = Rig(0, limits=replace(SMALL, total_bytes=600))
    rig.receiver.grant(1 << 30)
    rig.start(*TRANSFERS)
    while not rig.is_over():
        rig.tick()
        assert sum(rig.sender.scheduler.in_flight(stream) for stream in Stream) <= 600
    rig.check_complete()
