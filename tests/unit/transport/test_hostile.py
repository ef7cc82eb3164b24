"""Different, late or lying ends, and strangers. They must not change anything."""

from __future__ import annotations

from itertools import islice

import pytest

from kvspec_testkit.transport.fuzz import damaged_messages, forged_messages
from kvspec_testkit.transport.network import SENDER
from kvspec_testkit.transport.rig import IDENTITY, POISON, SMALL, Pages, Rig
from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport import Stream, TransferShape
from sglang_kvspec.transport.frames import PROTOCOL, Abort, Ack, Data, Open
from sglang_kvspec.transport.wire import Drop, FrameError, decode, encode, seal

TRANSFERS = (1, 2, 3)


def started(rig: Rig) -> Rig:
    rig.start(*TRANSFERS)
    return rig


def test_a_recycled_page_is_never_written_again() -> None:
    rig = started(Rig(0))
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
    rig.settle()
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
    """The acknowledgement was lost. An Abort would make the transfer fail at the sender."""
    rig = started(Rig(0))
    rig.run(10)
    for _ in range(5):
        rig.tick()
    session = rig.receiver._session
    assert session is not None
    page = rig.targets[1].refs(rig.order[1])[0]
    frame = Data(session.session, 900, 1, Stream.ANCHOR, *page, 0, 130, 0, 50)
    before = [t.clone() for stream in rig.targets[1].tensors for t in stream]
    rig.network.ports[b"receiver"].inbox.append((b"", [encode(frame, bytes(50)), bytes(50)]))
    rig.receiver.step()
    assert rig.receiver.counters.streams[Stream.ANCHOR].duplicate_bytes == 50
    assert not rig.receiver.counters.dropped
    sent = [decode([m.head])[0] for m in rig.network.ports[b"receiver"].outbox]
    assert not any(isinstance(frame, Abort) for frame in sent)
    after = [t for stream in rig.targets[1].tensors for t in stream]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


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
    with pytest.raises(TransportError, match="distinct pages"):
        rig.receiver.expect(2, [(1, 1), (1, 1), (2, 2), (3, 3)], rig.shape, target.memory)


def test_strangers_and_forgers_change_nothing() -> None:
    """Both ends get thousands of messages that no honest end sends, while a transfer runs."""
    rig = started(Rig(0))
    to_sender = rig.network.ports[SENDER].inbox
    to_receiver = rig.network.ports[b"receiver"].inbox
    damaged, forged = damaged_messages(3), forged_messages(4)
    for _ in range(30):
        for message in (*islice(damaged, 40), *islice(forged, 40)):
            to_sender.append((rig.random.choice([b"receiver", b"stranger"]), message))
            to_receiver.append((b"", message))
        rig.tick()
    rig.run(30)
    rig.check_complete()
    assert rig.sender.counters.sessions == 1
    for counters in (rig.sender.counters, rig.receiver.counters):
        assert counters.dropped.total() >= 30 * 80 - 20


def test_a_sender_that_lies_writes_nowhere_else() -> None:
    """Frames of the right session with invented pages, chunks, offsets and generations."""
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
            size=rig.random.choice([130, 470, rig.random.randint(1, 600)]),
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
    rig = started(Rig(0))
    for _ in range(4):
        rig.tick()
    name, session = rig.sender.peers.live()[0]
    inbox = rig.network.ports[SENDER].inbox
    number = session.session
    for sequence in range(1000, 1500):
        frame = rig.random.choice(
            [
                Ack(number, sequence, rig.random.randrange(1 << 40), b"\xff" * 128, 0, 0),
                Open(number, sequence, 1, ((1, 1),), 1, 1, 1, 1),
                Data(number, sequence, 1, Stream.ANCHOR, 0, 0, 0, 1, 0, 1),
            ]
        )
        payload = b"x" if isinstance(frame, Data) else None
        inbox.append((name, [encode(frame, payload), *([payload] if payload else [])]))
    for _ in range(100):
        rig.tick()
    rig.settle()
    # A receiver may acknowledge data that it lacks. That harms only itself. The sender stays
    # consistent.
    assert rig.sender.scheduler.in_flight(Stream.ANCHOR) <= SMALL.total_bytes


def test_many_holes_in_a_chunk_are_refused() -> None:
    rig = Rig(0, shape=TransferShape(1, 1, 4000, 0))
    target = Pages(1, rig.shape, None)
    rig.receiver.expect(1, target.refs([0]), rig.shape, target.memory)
    incoming = rig.receiver._arrivals.incoming[1]
    frames = [
        Data(1, 1, 1, Stream.ANCHOR, 0, 0, 0, 4000, offset, 1) for offset in range(0, 4000, 2)
    ]
    with pytest.raises(FrameError, match="256 holes"):
        [incoming.write(frame, b"x") for frame in frames]
