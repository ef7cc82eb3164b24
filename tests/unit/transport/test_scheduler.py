"""The sender's order and limits, and that no byte is lost when peers lose frames at random."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.flight import FlightLimits
from sglang_kvspec.transport.frames import Ack, Open, Stream
from sglang_kvspec.transport.replay import ReplayWindow
from sglang_kvspec.transport.scheduler import Choice, SendScheduler
from sglang_kvspec.transport.segments import SegmentKey

LIMITS = FlightLimits(piece_bytes=10, residual_bytes=25, total_bytes=60, frames=8)
PEERS = (b"a", b"b")
BYTES = {Stream.ANCHOR: 23, Stream.RESIDUAL: 57}
CREDIT = 1 << 20


def open_frame(transfer: int, num_pages: int = 2, num_chunks: int = 1) -> Open:
    pages = tuple((40 + page, transfer) for page in range(num_pages))
    return Open(1, 1, transfer, pages, num_chunks, *BYTES.values(), num_pages)


def offer(scheduler: SendScheduler, transfer: int, stream: Stream, page: int, now_s: float) -> bool:
    view = memoryview(bytes(BYTES[stream]))
    return scheduler.offer(SegmentKey(transfer, stream, page, 0), view, now_s)


@dataclass
class Simulation:
    """A scheduler and its peers. The fields record independently what was sent and received."""

    scheduler: SendScheduler = field(default_factory=lambda: SendScheduler(LIMITS))
    now_s: float = 0.0
    sequence: dict[bytes, int] = field(default_factory=lambda: defaultdict(int))
    windows: dict[bytes, ReplayWindow] = field(default_factory=dict)
    flying: dict[bytes, dict[int, Choice]] = field(default_factory=dict)
    got: dict[SegmentKey, list[int]] = field(default_factory=dict)
    opened: dict[int, bytes] = field(default_factory=dict)
    offered: set[SegmentKey] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def connect(self, peer: bytes) -> None:
        self.scheduler.suspend_peer(peer)
        self.scheduler.add_peer(peer, CREDIT)
        self.windows[peer], self.flying[peer] = ReplayWindow(), {}
        self.sequence[peer] = 0

    def send(self) -> Choice | None:
        choice = self.scheduler.choose()
        if choice is None:
            return None
        key = choice.piece.segment.key
        assert self.opened[key.transfer] == choice.peer
        assert (choice.page, choice.generation) == (40 + key.page_index, key.transfer)
        self.sequence[choice.peer] += 1
        self.scheduler.commit(choice, self.sequence[choice.peer])
        self.flying[choice.peer][self.sequence[choice.peer]] = choice
        flight = self.scheduler.flight(choice.peer)
        assert flight is not None
        assert flight.bytes_of[Stream.RESIDUAL] <= LIMITS.residual_bytes
        assert flight.total_bytes <= LIMITS.total_bytes
        assert len(flight) <= LIMITS.frames
        return choice

    def arrive(self, peer: bytes, sequence: int) -> None:
        if not self.windows[peer].admit(sequence):
            return
        choice = self.flying[peer].pop(sequence, None)
        if choice is not None:
            piece = choice.piece
            flags = self.got.setdefault(piece.segment.key, [0] * len(piece.segment.view))
            for i in range(piece.offset, piece.offset + piece.length):
                flags[i] = 1

    def acknowledge(self, peer: bytes, *, ping: bool) -> None:
        echo = 0
        if ping:
            self.sequence[peer] += 1
            echo = self.sequence[peer]
            self.windows[peer].admit(echo)
        window = self.windows[peer]
        ack = Ack(1, 1, window.highest, window.bitmap(), echo, CREDIT)
        _, ended = self.scheduler.acknowledge(peer, ack)
        for end in ended:
            assert end.reason is None
            assert not end.segments
            assert end.transfer not in self.ended
            self.ended.add(end.transfer)

    def finish(self) -> None:
        """Stop all faults. Everything offered and open must arrive."""
        for peer in PEERS:
            self.connect(peer)
        for _ in range(2000):
            if self.send() is None:
                if self.scheduler.is_idle:
                    return
                for peer in PEERS:
                    for sequence in sorted(self.flying[peer]):
                        self.arrive(peer, sequence)
                    self.acknowledge(peer, ping=True)


actions = st.lists(
    st.tuples(
        st.sampled_from(["offer", "open", "send", "arrive", "lose", "ack", "ping", "cut"]),
        st.integers(0, 1000),
    ),
    max_size=120,
)


@given(actions)
def test_every_byte_arrives_and_bounds_hold_whatever_is_lost(steps: list[tuple[str, int]]) -> None:
    world = Simulation()
    for peer in PEERS:
        world.connect(peer)
    keys = [SegmentKey(t, s, p, 0) for t in range(4) for s in Stream for p in range(2)]
    for action, number in steps:
        world.now_s += 1
        peer = PEERS[number % 2]
        flying = sorted(world.flying[peer])
        if action == "offer" and (key := keys[number % len(keys)]) not in world.offered:
            world.offered.add(key)
            assert offer(world.scheduler, key.transfer, key.stream, key.page_index, world.now_s)
        elif action == "open" and number % 4 not in world.opened:
            world.opened[number % 4] = peer
            assert world.scheduler.open(peer, open_frame(number % 4)).refusal is None
        elif action == "send":
            world.send()
        elif action in ("arrive", "lose") and flying:
            sequence = flying[number // 2 % len(flying)]
            if action == "arrive":
                world.arrive(peer, sequence)
            else:
                del world.flying[peer][sequence]
        elif action in ("ack", "ping"):
            world.acknowledge(peer, ping=action == "ping")
        elif action == "cut":
            world.connect(peer)
    for key in keys:
        if key.transfer not in world.ended and key not in world.offered:
            offer(world.scheduler, key.transfer, key.stream, key.page_index, world.now_s)
        if key.transfer not in world.opened:
            world.opened[key.transfer] = PEERS[0]
            assert world.scheduler.open(PEERS[0], open_frame(key.transfer)).refusal is None
    world.finish()
    assert world.ended == set(range(4))
    assert all(all(world.got[key]) for key in keys)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(Stream)), min_size=1, max_size=30),
    st.integers(0, 3),
)
def test_anchors_first_and_then_the_longest_waiting(
    offers: list[tuple[int, Stream]], in_between: int
) -> None:
    """With one connection that takes everything, the order is that of (stream, time of waiting)."""
    roomy = FlightLimits(piece_bytes=10, residual_bytes=10**6, total_bytes=10**7, frames=500)
    scheduler = SendScheduler(roomy)
    scheduler.add_peer(b"a", 10**8)
    for transfer in range(6):
        scheduler.open(b"a", open_frame(transfer, num_pages=64))
    since: dict[tuple[int, Stream], float] = {}
    left: dict[tuple[int, Stream], int] = defaultdict(int)
    sequence = 0

    def send_one() -> None:
        nonlocal sequence
        choice = scheduler.choose()
        assert choice is not None
        sequence += 1
        scheduler.commit(choice, sequence)
        key = choice.piece.segment.key
        chosen = (key.transfer, key.stream)
        waiting = [entry for entry, num_bytes in left.items() if num_bytes]
        first = min(waiting, key=lambda entry: (entry[1], since[entry]))
        assert (chosen[1], since[chosen]) == (first[1], since[first])
        left[chosen] -= choice.piece.length

    for now_s, (transfer, stream) in enumerate(offers):
        entry = (transfer, stream)
        if not left[entry]:
            since[entry] = now_s
        offer(scheduler, transfer, stream, now_s, now_s)
        left[entry] += BYTES[stream]
        for _ in range(in_between):
            if any(left.values()):
                send_one()
    while any(left.values()):
        send_one()
    assert scheduler.choose() is None


def test_an_anchor_goes_next_however_many_residuals_wait() -> None:
    world = Simulation()
    world.connect(b"a")
    for transfer in range(3):
        world.opened[transfer] = b"a"
        world.scheduler.open(b"a", open_frame(transfer))
    for page in range(2):
        offer(world.scheduler, 0, Stream.RESIDUAL, page, 0.0)
    while world.send():
        pass
    flight = world.scheduler.flight(b"a")
    assert flight is not None
    assert 0 < flight.bytes_of[Stream.RESIDUAL] <= LIMITS.residual_bytes
    offer(world.scheduler, 2, Stream.ANCHOR, 0, 9.0)
    choice = world.send()
    assert choice is not None
    assert choice.piece.segment.key == SegmentKey(2, Stream.ANCHOR, 0, 0)


def test_what_was_lost_goes_first_and_in_order_even_in_smaller_pieces() -> None:
    world = Simulation()
    world.connect(b"a")
    world.opened[0] = b"a"
    world.scheduler.open(b"a", open_frame(0))
    for page in range(2):
        offer(world.scheduler, 0, Stream.ANCHOR, page, 0.0)
    for _ in range(2):
        assert world.send()
    world.connect(b"a")
    flight = world.scheduler.flight(b"a")
    assert flight is not None
    flight.grant(4)
    first = world.send()
    assert first is not None
    assert (first.piece.offset, first.piece.length) == (0, 4)
    flight.grant(CREDIT)
    places = []
    while (choice := world.send()) is not None:
        key, piece = choice.piece.segment.key, choice.piece
        places.append((key.page_index, piece.offset, piece.length))
    assert places == [(0, 4, 6), (0, 10, 10), (0, 20, 3), (1, 0, 10), (1, 10, 10), (1, 20, 3)]


def test_a_peer_without_credit_delays_no_other_peer() -> None:
    world = Simulation()
    for peer in PEERS:
        world.connect(peer)
    for transfer, peer in enumerate(PEERS):
        world.opened[transfer] = peer
        world.scheduler.open(peer, open_frame(transfer))
        offer(world.scheduler, transfer, Stream.ANCHOR, 0, float(transfer))
    flight = world.scheduler.flight(b"a")
    assert flight is not None
    flight.grant(0)
    choice = world.send()
    assert choice is not None
    assert choice.peer == b"b"
    assert world.scheduler.choose(blocked={b"b"}) is None


def test_an_aborted_transfer_is_never_sent_again() -> None:
    world = Simulation()
    world.connect(b"a")
    world.opened[0] = b"a"
    world.scheduler.open(b"a", open_frame(0))
    offer(world.scheduler, 0, Stream.ANCHOR, 0, 0.0)
    assert world.send()
    ended = world.scheduler.abort(0, "not wanted")
    assert ended is not None
    assert (ended.peer, ended.reason, len(ended.segments)) == (b"a", "not wanted", 1)
    assert not world.scheduler.is_idle
    world.scheduler.suspend_peer(b"a")
    world.connect(b"a")
    assert world.scheduler.choose() is None
    assert world.scheduler.is_idle
    assert not offer(world.scheduler, 0, Stream.ANCHOR, 1, 1.0)
    assert world.scheduler.open(b"a", open_frame(0)).refusal == "not wanted"


def test_offers_that_fit_no_transfer_are_refused() -> None:
    scheduler = SendScheduler(LIMITS)
    assert scheduler.open(b"a", open_frame(0)).refusal is None
    with pytest.raises(TransportError, match="outside"):
        offer(scheduler, 0, Stream.ANCHOR, 2, 0.0)
    with pytest.raises(TransportError, match="24 bytes, the limit is 23"):
        scheduler.offer(SegmentKey(0, Stream.ANCHOR, 0, 0), memoryview(bytes(24)), 0.0)
    with pytest.raises(TransportError, match="no bytes"):
        scheduler.offer(SegmentKey(0, Stream.ANCHOR, 0, 0), memoryview(b""), 0.0)
    offer(scheduler, 0, Stream.ANCHOR, 0, 0.0)
    with pytest.raises(TransportError, match="already offered"):
        offer(scheduler, 0, Stream.ANCHOR, 0, 0.0)
