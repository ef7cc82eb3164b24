"""The outbox bounds the packed pages in host memory, and no stream or receiver waits for
another."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import CodecError
from sglang_kvspec.runtime.disaggregation.departures import FREED
from sglang_kvspec.runtime.disaggregation.outbox import PORTIONS, Outbox
from sglang_kvspec.transport import SegmentKey, Stream

SIZE, ROOM = 32, 7
# Bytes for each stream. 6 pages of anchors are packed together.
READY = 960


class Wire:
    """Page wire with 10 bytes of anchor and 30 of residual a page, all of them its id. `spoiled`:
    pages that the wire cannot carry."""

    anchor_bytes, residual_bytes = 10, 30

    def __init__(self):
        self.packed = []
        self.spoiled = set()

    def pack(self, stream, pages, num_parts=1):
        if self.spoiled.intersection(pages):
            raise CodecError(f"page {pages[0]} and on hold NaN")
        self.packed.append((stream, list(pages)))
        size = self.anchor_bytes if stream is Stream.ANCHOR else self.residual_bytes
        whole = [torch.full((size,), page, dtype=torch.uint8) for page in pages]
        return [list(page.chunk(num_parts)) for page in whole]


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def offered():
    return {}


@pytest.fixture
def outbox(wire, offered):
    """Outbox with room for 96 pages of anchors and 32 of residuals."""
    return Outbox(wire, offered.__setitem__, ready_bytes=READY)


def keys(offered, stream):
    return [key for key in offered if key.stream is stream]


def test_no_more_lies_ready_than_allowed(outbox, offered):
    outbox.add(ROOM, 0, list(range(100, 250)))
    assert outbox.pack() == {}
    assert len(keys(offered, Stream.ANCHOR)) == 96
    assert len(keys(offered, Stream.RESIDUAL)) == 32
    assert outbox.num_ready_bytes == 2 * READY
    for _ in range(200):
        if not offered:
            break
        for key in list(offered)[:5]:
            assert int(offered.pop(key)[0]) == 100 + key.page_index
            outbox.released(key)
        outbox.pack()
        assert outbox.num_ready_bytes <= 2 * READY
    assert not offered
    assert outbox.num_ready_bytes == 0


def test_every_page_is_sent_once_in_order(outbox, offered):
    outbox.add(ROOM, 0, [11, 12, 13])
    outbox.add(ROOM, 3, [14])
    outbox.add(9, 0, [15])
    outbox.pack()
    outbox.pack()
    places = [(key.transfer, key.page_index) for key in keys(offered, Stream.ANCHOR)]
    assert places == [(ROOM, 0), (ROOM, 1), (ROOM, 2), (ROOM, 3), (9, 0)]
    pages = [int(offered[SegmentKey(*at, 0)][0]) for at in _all(places)]
    assert pages == [11, 12, 13, 14, 15] * 2


def _all(places):
    return [(room, stream, index) for stream in Stream for room, index in places]


def test_anchors_do_not_wait_for_residuals(outbox, offered):
    """The residuals fill all memory that they may use."""
    outbox.add(ROOM, 0, list(range(50)))
    outbox.pack()
    offered.clear()
    outbox.add(ROOM, 50, [200, 201])
    outbox.pack()
    assert [(key.stream, key.page_index) for key in offered] == [
        (Stream.ANCHOR, 50),
        (Stream.ANCHOR, 51),
    ]


def test_no_receiver_waits_for_another(outbox, offered):
    """One receiver takes no pages, although it uses all memory that may be ready."""
    outbox.add(ROOM, 0, list(range(150)))
    outbox.pack()
    assert len(keys(offered, Stream.ANCHOR)) == 96
    outbox.add(9, 0, list(range(200, 210)))
    outbox.pack()
    stalled = dict(offered)
    arrived = []
    for _ in range(10):
        for key in [key for key in offered if key.transfer == 9]:
            arrived.append((key.stream, int(offered.pop(key)[0])))
            outbox.released(key)
        assert len(keys(offered, Stream.ANCHOR)) <= 96 + 6
        outbox.pack()
    assert sorted(arrived) == [(stream, page) for stream in Stream for page in range(200, 210)]
    assert {key for key in offered} == {key for key in stalled if key.transfer == ROOM}


def test_memory_counts_until_all_that_was_packed_with_it_is_released(outbox, offered):
    """Pages that were packed together share one piece of memory."""
    outbox.add(ROOM, 0, list(range(96)))
    outbox.pack()
    first, *others = keys(offered, Stream.ANCHOR)[: 96 // PORTIONS]
    for key in others:
        outbox.released(key)
    assert outbox.num_ready_bytes == 2 * READY
    outbox.released(first)
    assert outbox.num_ready_bytes == 2 * READY - 60


def test_pages_are_packed_many_at_a_time(outbox, offered, wire):
    """Each packing costs a wait for the device."""
    outbox.add(ROOM, 0, list(range(120)))
    outbox.pack()
    wire.packed.clear()
    for key in keys(offered, Stream.ANCHOR)[:5]:
        outbox.released(key)
        outbox.pack()
    assert wire.packed == []
    outbox.released(keys(offered, Stream.ANCHOR)[5])
    outbox.pack()
    assert wire.packed == [(Stream.ANCHOR, list(range(96, 102)))]


def test_a_page_larger_than_all_room_goes_alone(wire, offered):
    outbox = Outbox(wire, offered.__setitem__, ready_bytes=5)
    outbox.add(ROOM, 0, [1, 2])
    outbox.pack()
    assert len(offered) == 2
    for key in list(offered):
        outbox.released(key)
    outbox.pack()
    assert len(offered) == 4


def test_no_more_of_a_dropped_request_is_packed(outbox, offered):
    outbox.add(ROOM, 0, list(range(100)))
    outbox.add(9, 0, list(range(140, 150)))
    outbox.pack()
    assert outbox.rooms_of([99, 149]) == {ROOM, 9}
    outbox.drop(ROOM)
    assert outbox.rooms_of([99]) == set()
    for key in list(offered):
        outbox.released(key)
    offered.clear()
    outbox.pack()
    assert {key.transfer for key in offered} == {9}


def test_a_page_that_cannot_be_carried_ends_its_request_alone(outbox, offered, wire):
    wire.spoiled = {2}
    outbox.add(ROOM, 0, [1, 2, 3])
    outbox.add(ROOM, 3, [5])
    outbox.add(9, 0, [4])
    assert outbox.pack() == {ROOM: "page 1 and on hold NaN"}
    assert {key.transfer for key in offered} == {9}
    assert outbox.pack() == {}


# In a server


@pytest.mark.parametrize("mode", ["split", "full"])
def test_a_prompt_crosses_through_little_memory(make_lab, mode):
    lab = make_lab(mode, ready_bytes=1)
    request = lab.request(4 * SIZE + 5)
    lab.departures.add(ROOM)
    lab.expect(request)
    lab.send(request)
    most = 0
    for _ in range(5):
        most = max(most, lab.departures.outbox.num_ready_bytes)
        lab.link.deliver()
        lab.departures.pump()
        lab.pump()
    page = lab.prefill.plan.page_bytes
    assert 0 < most <= max(page.anchor + page.residual, page.plain)
    assert lab.arrivals.is_draftable(ROOM)
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    for got, want in zip(lab.target(request), (request.k, request.v), strict=True):
        assert torch.equal(got, want)
    assert lab.departures.outbox.num_ready_bytes == 0


def test_pages_that_are_freed_before_they_were_packed_end_their_request(make_lab):
    lab = make_lab(ready_bytes=1)
    request = lab.request(4 * SIZE + 5)
    lab.departures.add(ROOM)
    lab.expect(request)
    lab.send(request)
    lab.departures.release(request.prefill_pages[:1])
    assert lab.link.aborted == {}, "its bytes are with the link"
    lab.departures.release(request.prefill_pages[2:3])
    assert lab.link.aborted == {ROOM: FREED}
    assert lab.departures.of(ROOM).ended == FREED
    lab.prefill.free_pages(request.prefill_pages)
    lab.link.deliver()
    lab.departures.pump()
    assert not lab.link.offers


def test_a_request_that_is_dropped_while_its_pages_are_packed(outbox, wire, offered):
    """Garbage collection during packing may drop a request whose sender is no longer referenced."""
    outbox.add(ROOM, 0, [11, 12])
    outbox.add(9, 0, [15])
    pack = wire.pack

    def dropping(stream, pages, num_parts):
        outbox.drop(ROOM)
        return pack(stream, pages, num_parts)

    wire.pack = dropping
    assert outbox.pack() == {}
    assert {key.transfer for key in offered} == {9}
    for key in list(offered):
        outbox.released(key)
    assert outbox.num_ready_bytes == 0
