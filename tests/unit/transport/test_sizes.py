"""Chunks of any size up to a limit: which sizes are accepted, and the effect of wrong ones."""

from __future__ import annotations

import msgspec
import pytest

from kvspec_testkit.transport.network import SENDER
from kvspec_testkit.transport.rig import POISON, Pages, Rig
from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport import PageArrived, SegmentKey, Stream, TransferShape
from sglang_kvspec.transport.arrivals import Incoming
from sglang_kvspec.transport.frames import PROTOCOL, Data, Open
from sglang_kvspec.transport.wire import Drop, FrameError, decode, encode, seal

SHAPE = TransferShape(2, 2, 100, 300, num_residual_pages=1)


def incoming(target: Pages) -> Incoming:
    return Incoming(1, SHAPE, target.refs([0, 1]), target.memory, 0.0)


def data(size: int, offset: int, length: int, *, page: int = 0, chunk: int = 0) -> Data:
    return Data(1, 1, 1, Stream.ANCHOR, page, page, chunk, size, offset, length)


def drop_of(incoming: Incoming, frame: Data) -> Drop:
    with pytest.raises(FrameError) as caught:
        incoming.write(frame, b"x" * frame.length)
    return caught.value.drop


def test_only_the_bytes_of_a_chunk_are_written_and_its_page_says_how_many() -> None:
    target = Pages(2, SHAPE, None)
    into = incoming(target)
    assert into.write(data(60, 0, 40), b"a" * 40) == (40, None)
    assert into.write(data(60, 40, 20), b"b" * 20) == (20, None)
    event = PageArrived(1, Stream.ANCHOR, 0, (60, 1))
    assert into.write(data(1, 0, 1, chunk=1), b"c") == (1, event)
    assert event.num_bytes == 61
    row = bytes(target.tensors[Stream.ANCHOR][0][0].tolist())
    assert row == b"a" * 40 + b"b" * 20 + bytes([POISON]) * 40


@pytest.mark.parametrize("full", [False, True])
def test_frames_of_a_chunk_must_agree_on_its_size(full: bool) -> None:
    target = Pages(2, SHAPE, None)
    into = incoming(target)
    into.write(data(60, 0, 60 if full else 40), b"a" * (60 if full else 40))
    before = target.tensors[Stream.ANCHOR][0].clone()
    for size in (59, 61, 100):
        assert drop_of(into, data(size, 40, 10)) is Drop.MISPLACED
    assert (target.tensors[Stream.ANCHOR][0] == before).all()
    assert into.write(data(60, 40, 20), b"a" * 20)[0] == (0 if full else 20)


@pytest.mark.parametrize(
    ("size", "offset", "length"), [(101, 0, 10), (60, 50, 11), (60, 60, 1), (1 << 30, 0, 1)]
)
def test_sizes_above_the_bound_and_pieces_past_the_size_are_dropped(
    size: int, offset: int, length: int
) -> None:
    target = Pages(2, SHAPE, None)
    into = incoming(target)
    assert drop_of(into, data(size, offset, length)) is Drop.MISPLACED
    assert (target.tensors[Stream.ANCHOR][0] == POISON).all()
    assert into.write(data(100, 0, 100), b"a" * 100) == (100, None)


@pytest.mark.parametrize("size", [0, -1, 1 << 31])
def test_sizes_that_no_chunk_has_are_no_frames(size: int) -> None:
    body = [1, 1, 1, 0, 0, 0, 0, size, 0, 1]
    head = seal(PROTOCOL, 9, msgspec.msgpack.encode(body), b"x")
    with pytest.raises(FrameError) as caught:
        decode([head, b"x"])
    assert caught.value.drop is Drop.MALFORMED


def test_residuals_of_pages_without_any_are_dropped() -> None:
    target = Pages(2, SHAPE, None)
    into = incoming(target)
    assert into.missing == [4, 2]
    frame = Data(1, 1, 1, Stream.RESIDUAL, 1, 1, 0, 10, 0, 10)
    assert drop_of(into, frame) is Drop.MISPLACED


def test_a_destination_with_too_little_room_fails_the_transfer_at_both_ends() -> None:
    """The receiver itself continues, because chunk sizes come from the wire."""
    rig = Rig(0)
    small = Pages(4, TransferShape(4, 3, 129, 470), None)
    rig.receiver.expect(1, small.refs([0, 1, 2, 3]), rig.shape, small.memory)
    rig.targets[1] = small
    rig.offer(1)
    rig.run(10)
    assert "has 130 bytes, its place 129" in rig.failures()[1]
    assert rig.receiver.counters.dropped[Drop.NO_ROOM] == 1
    rig.settle()
    rig.check_nothing_left()


def test_an_offer_that_is_too_large_is_the_callers_mistake_once_the_shape_is_known() -> None:
    rig = Rig(0)
    rig.expect(1)
    for _ in range(5):
        rig.tick()
    with pytest.raises(TransportError, match="131 bytes, the limit is 130"):
        rig.sender.offer(SegmentKey(1, Stream.ANCHOR, 0, 0), memoryview(bytes(131)))
    rig.offer(1)
    rig.run(10)
    rig.check_complete()


def test_offers_larger_than_a_later_open_allows_fail_the_transfer_at_both_ends() -> None:
    rig = Rig(0)
    rig.offer(1)
    rig.shape = TransferShape(4, 3, 129, 470)
    rig.expect(1)
    rig.run(10)
    assert "has 130 bytes, the limit is 129" in rig.failures()[1]
    rig.settle()
    rig.check_nothing_left()


def test_an_open_that_is_repeated_with_other_residuals_is_refused() -> None:
    rig = Rig(0)
    rig.expect(1)
    for _ in range(5):
        rig.tick()
    name, session = rig.sender.peers.live()[0]
    opened = rig.sender.scheduler._transfers[1]
    frame = Open(session.session, 1000, 1, tuple(opened.pages), 3, 130, 470, 2)
    rig.network.ports[SENDER].inbox.append((name, [encode(frame)]))
    for _ in range(2):
        rig.tick()
    assert "into other pages" in rig.failures()[1]
    assert opened.shape == TransferShape(4, 3, 130, 470, 4)


@pytest.mark.parametrize("num_residual_pages", [-1, 3])
def test_no_transfer_has_more_residual_pages_than_pages(num_residual_pages: int) -> None:
    with pytest.raises(TransportError, match="no transfer can have"):
        TransferShape(2, 1, 100, 300, num_residual_pages)


def test_a_transfer_without_residuals_is_complete_with_its_anchors() -> None:
    shape = TransferShape(4, 3, 130, 470, num_residual_pages=0)
    rig = Rig(0, shape=shape)
    rig.start(1)
    rig.run(10)
    rig.check_complete()
    assert {e.stream for e in rig.arrived if isinstance(e, PageArrived)} == {Stream.ANCHOR}
