"""Whole transfers on a network in memory that loses, repeats, delays, damages and breaks. Memory is
poisoned as soon as the sender releases it, so a use after that shows."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport import SegmentKey, Stream, StreamArrived, TransferEnded, TransferShape
from sglang_kvspec.transport.frames import PROTOCOL, Abort, Ack, Data, Open
from sglang_kvspec.transport.testing.fuzz import damaged_messages, forged_messages
from sglang_kvspec.transport.testing.network import SENDER, Faults
from sglang_kvspec.transport.testing.rig import IDENTITY, POISON, SMALL, Pages, Rig
from sglang_kvspec.transport.wire import Drop, FrameError, decode, encode, seal

TRANSFERS = (1, 2, 3)
FAULTS = {
    "none": Faults(),
    "one in a hundred damaged": Faults(damage=0.01),
    "lost": Faults(lose=0.1),
    "twice": Faults(repeat=0.3),
    "out of order": Faults(delay=0.5),
    "everything": Faults(0.05, 0.1, 0.2, 0.05),
}


def start(rig: Rig) -> Rig:
    for transfer in TRANSFERS:
        rig.expect(transfer)
        rig.offer(transfer)
    return rig


def settle(rig: Rig) -> None:
    """A quiet second: acknowledgements of what was sent twice come in."""
    rig.network.faults = Faults()
    for _ in range(500):
        rig.tick()


def check(rig: Rig) -> None:
    assert rig.is_over()
    assert rig.failures() == {}
    for transfer in TRANSFERS:
        rig.check_arrived(transfer)
    settle(rig)
    rig.check_nothing_left()
    written = rig.receiver.counters.streams
    for stream in Stream:
        expected = len(TRANSFERS) * rig.shape.num_segments(stream) * rig.shape.chunk_bytes(stream)
        assert written[stream].payload_bytes == expected
        assert rig.sender.counters.streams[stream].payload_bytes >= expected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_transfers_are_complete_whatever_the_network_does(faults: Faults, seed: int) -> None:
    rig = start(Rig(seed, faults))
    rig.run(60)
    assert (rig.network.num_faults > 0) == (faults != Faults())
    check(rig)


@pytest.mark.parametrize(
    "shape",
    [
        TransferShape(1, 1, 1, 0),
        TransferShape(1, 1, 1, 1),
        TransferShape(3, 2, 100, 300),
        TransferShape(2, 1, 101, 0),
    ],
    ids=str,
)
def test_awkward_shapes(shape: TransferShape) -> None:
    rig = start(Rig(0, shape=shape))
    rig.run(10)
    check(rig)


def test_pieces_that_were_not_lost_are_not_sent_again() -> None:
    rig = start(Rig(0))
    rig.run(10)
    check(rig)
    assert all(c.resent_frames == 0 for c in rig.sender.counters.streams.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_connection_that_breaks_again_and_again(seed: int) -> None:
    rig = start(Rig(seed))
    for _ in range(6):
        for _ in range(rig.random.randint(2, 6)):
            rig.tick()
        rig.step_sender()
        rig.network.cut()
    rig.run(30)
    check(rig)
    assert sum(c.resent_frames for c in rig.sender.counters.streams.values())


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
    check(rig)


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
    rig = start(Rig(0))
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
    check(rig)


def test_credit_stops_a_sender_and_lets_it_go_on() -> None:
    rig = start(Rig(0))
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
    check(rig)


def test_a_receiver_that_restarts_fails_its_transfers_at_the_sender() -> None:
    rig = start(Rig(0))
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


def test_a_sender_that_restarts_goes_on_with_what_it_offers_again() -> None:
    rig = start(Rig(0))
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
    check(rig)
    assert rig.receiver.counters.sessions == 2


def test_a_sender_that_never_comes_back_fails_transfers_with_a_reason() -> None:
    rig = start(Rig(0))
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
    rig = start(Rig(0, Faults(lose=0.2)))
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
    settle(rig)
    rig.check_nothing_left()
    assert not rig.sender.offer(SegmentKey(2, Stream.ANCHOR, 0, 0), memoryview(b"late"))


def test_a_recycled_page_is_never_written_again() -> None:
    rig = start(Rig(0))
    for _ in range(5):
        rig.tick()
    target, page = rig.targets[2], rig.order[2][0]
    target.generations[page] += 1000
    for stream in target.tensors:
        for tensor in stream:
            tensor[page] = 0x77
    rig.run(30)
    assert "recycled" in rig.failures()[2]
    assert all((tensor[page] == 0x77).all() for stream in target.tensors for tensor in stream)
    for transfer in (1, 3):
        rig.check_arrived(transfer)
    settle(rig)
    rig.check_nothing_left()


def test_a_late_frame_of_an_older_transfer_into_the_same_page_is_dropped() -> None:
    rig = Rig(0)
    rig.expect(1)
    rig.offer(1)
    for _ in range(5):
        rig.tick()
    old = [m for m in rig.network.ports[b"receiver"].inbox]
    rig.receiver.cancel(1, "request aborted")
    target, order = rig.targets[1], rig.order[1]
    for page in order:
        target.generations[page] += 1000
    rig.receiver.expect(9, target.refs(order), rig.shape, target.memory)
    before = [t.clone() for stream in target.tensors for t in stream]
    rig.network.ports[b"receiver"].inbox.extend(old)
    for _ in range(50):
        rig.tick()
    after = [t for stream in target.tensors for t in stream]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_a_piece_that_comes_again_after_the_end_is_a_duplicate() -> None:
    """The acknowledgement was lost: an Abort would tell the sender that it failed."""
    rig = start(Rig(0))
    rig.run(10)
    for _ in range(5):
        rig.tick()
    session = rig.receiver._session
    assert session is not None
    page = rig.targets[1].refs(rig.order[1])[0]
    frame = Data(session.session, 900, 1, Stream.ANCHOR, *page, 0, 0, 50)
    before = [t.clone() for stream in rig.targets[1].tensors for t in stream]
    rig.network.ports[b"receiver"].inbox.append((b"", [encode(frame, bytes(50)), bytes(50)]))
    rig.receiver.step()
    assert rig.receiver.counters.streams[Stream.ANCHOR].duplicate_bytes == 50
    assert not rig.receiver.counters.dropped
    sent = [decode([m.head])[0] for m in rig.network.ports[b"receiver"].outbox]
    assert not any(isinstance(frame, Abort) for frame in sent)
    after = [t for stream in rig.targets[1].tensors for t in stream]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_a_transfer_that_takes_too_long_is_given_up() -> None:
    rig = Rig(0)
    target = Pages(4, rig.shape, None)
    pages = target.refs([0, 1, 2, 3])
    rig.receiver.expect(1, pages, rig.shape, target.memory, timeout_s=5.0)
    rig.targets[1] = target
    rig.run(20)
    assert "longer than" in rig.failures()[1]
    assert rig.clock() == pytest.approx(105, abs=0.1)


def test_unequal_ends_are_refused_with_a_reason() -> None:
    rig = Rig(0)
    rig.receiver._identity = replace_identity(codec="uniform4")
    rig.expect(1)
    rig.offer(1)
    for _ in range(10):
        rig.tick()
    assert "--kvspec-codec" in rig.failures()[1]
    assert "sender has log4, receiver uniform4" in rig.failures()[1]
    with pytest.raises(HandshakeRefused, match="kvspec-codec"):
        rig.expect(2)
    assert rig.receiver.counters.streams[Stream.ANCHOR].frames == 0


def test_another_protocol_is_refused_with_a_reason() -> None:
    rig = Rig(0)
    port = rig.network.port(b"receiver")
    port.send(b"", seal(PROTOCOL + 1, 0, b"some other body", None))
    rig.network.carry()
    rig.sender.step()
    rig.network.carry()
    message = port.receive()
    assert message is not None
    answer, _ = decode(message[1])
    assert "protocol must be the same" in answer.reason  # type: ignore[union-attr]


def replace_identity(**changes: object) -> object:
    import msgspec

    return msgspec.structs.replace(IDENTITY, **changes)


def test_two_transfers_of_one_name_and_wrong_pages_are_refused() -> None:
    rig = Rig(0)
    rig.expect(1)
    with pytest.raises(TransportError, match="already"):
        rig.expect(1)
    target = Pages(4, rig.shape, None)
    with pytest.raises(TransportError, match="twice"):
        rig.receiver.expect(2, [(1, 1), (1, 1), (2, 2), (3, 3)], rig.shape, target.memory)


def test_strangers_and_forgers_change_nothing() -> None:
    """Thousands of messages that no honest end sends, at both ends, while a transfer runs."""
    rig = start(Rig(0))
    to_sender = rig.network.ports[SENDER].inbox
    to_receiver = rig.network.ports[b"receiver"].inbox
    damaged, forged = damaged_messages(3), forged_messages(4)
    for _ in range(30):
        for message in (*islice(damaged, 40), *islice(forged, 40)):
            to_sender.append((rig.random.choice([b"receiver", b"stranger"]), message))
            to_receiver.append((b"", message))
        rig.tick()
    rig.run(30)
    check(rig)
    assert rig.sender.counters.sessions == 1
    for counters in (rig.sender.counters, rig.receiver.counters):
        assert counters.dropped.total() >= 30 * 80 - 20


def test_a_sender_that_lies_writes_nowhere_else() -> None:
    """Frames of the right session with places made up: wrong page, chunk, offset, generation."""
    rig = Rig(0)
    rig.expect(1)
    for _ in range(5):
        rig.tick()
    session = rig.receiver._session
    assert session is not None
    inbox = rig.network.ports[b"receiver"].inbox
    for sequence in range(1000, 4000):
        frame = Data(
            session=session.session,
            sequence=sequence,
            transfer=rig.random.choice([1, 1, 1, 2]),
            stream=rig.random.choice(list(Stream)),
            page=rig.random.randrange(8),
            generation=rig.random.randrange(8),
            chunk=rig.random.randrange(5),
            offset=rig.random.randrange(500),
            length=rig.random.randint(1, 60),
        )
        payload = bytes(frame.length)
        inbox.append((b"", [encode(frame, payload), payload]))
    for _ in range(60):
        rig.receiver.step()
    dropped = rig.receiver.counters.dropped
    assert min(dropped[d] for d in (Drop.MISPLACED, Drop.STALE, Drop.UNKNOWN)) > 50
    target, order = rig.targets[1], rig.order[1]
    for stream in Stream:
        for tensor in target.tensors[stream]:
            for page in set(range(len(tensor))) - set(order):
                assert (tensor[page] == POISON).all()


def test_a_receiver_that_lies_gets_nothing() -> None:
    rig = start(Rig(0))
    for _ in range(4):
        rig.tick()
    name, session = rig.sender.peers.live()[0]
    inbox = rig.network.ports[SENDER].inbox
    number = session.session
    for sequence in range(1000, 1500):
        frame = rig.random.choice(
            [
                Ack(number, sequence, rig.random.randrange(1 << 40), b"\xff" * 128, 0, 0),
                Open(number, sequence, 1, ((1, 1),), 1, 1, 1),
                Data(number, sequence, 1, Stream.ANCHOR, 0, 0, 0, 0, 1),
            ]
        )
        payload = b"x" if isinstance(frame, Data) else None
        inbox.append((name, [encode(frame, payload), *([payload] if payload else [])]))
    for _ in range(100):
        rig.tick()
    settle(rig)
    # It may say that it has what it has not: its own loss. The sender stays whole.
    assert rig.sender.scheduler.in_flight(Stream.ANCHOR) <= SMALL.total_bytes


def test_many_holes_in_a_chunk_are_refused() -> None:
    rig = Rig(0, shape=TransferShape(1, 1, 4000, 0))
    target = Pages(1, rig.shape, None)
    rig.receiver.expect(1, target.refs([0]), rig.shape, target.memory)
    incoming = rig.receiver._arrivals.incoming[1]
    frames = [Data(1, 1, 1, Stream.ANCHOR, 0, 0, 0, offset, 1) for offset in range(0, 4000, 2)]
    with pytest.raises(FrameError, match="256 holes"):
        [incoming.write(frame, b"x") for frame in frames]


def test_limits_of_the_sender_narrow_what_a_receiver_grants() -> None:
    rig = Rig(0, limits=replace(SMALL, total_bytes=600))
    rig.receiver.grant(1 << 30)
    start(rig)
    while not rig.is_over():
        rig.tick()
        assert sum(rig.sender.scheduler.in_flight(stream) for stream in Stream) <= 600
    check(rig)
