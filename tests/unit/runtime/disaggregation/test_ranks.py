"""Two ranks of a decode server, each with a link and pools of its own, stay in the same state."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from sglang_kvspec.runtime.disaggregation.arrivals import ON_ANOTHER_RANK
from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED
from sglang_kvspec.runtime.disaggregation.retracted_kv import RetractedKV
from sglang_kvspec.transport import SegmentKey, Stream, TransferFailed

ROOM, SIZE = 7, 32
PAGES = 4
LENGTH = PAGES * SIZE + 5


class TwoRanks:
    """Ranks in two threads that call least() at once. num_messages counts the exchanges."""

    size = 2

    def __init__(self) -> None:
        self._barrier = Barrier(2, timeout=30)
        self._said: list[tuple[list[int], object]] = []
        self.num_messages = 0

    def least(self, mine: list[int], about: object) -> list[int]:
        self._said.append((list(mine), about))
        if self._barrier.wait() == 0:
            self.num_messages += 1
        (one, about_one), (other, about_other) = self._said[-2:]
        assert about_one == about_other, "ranks speak of different things"
        self._barrier.wait()
        return [min(pair) for pair in zip(one, other, strict=True)]


class Server:
    """Two labs, each with one rank of a prefill and of a decode server."""

    def __init__(self, make_lab: Callable[..., object], mode: str = "split") -> None:
        self.ranks = TwoRanks()
        self.labs = [make_lab(mode, ranks=self.ranks) for _ in range(2)]
        self.pool = ThreadPoolExecutor(2)

    def begin(self, num_tokens: int, room: int = ROOM, seed: int = 0):
        """Start the transfer of a request, whose heads are divided between both ranks."""
        requests = [lab.request(num_tokens, 10 * seed + at) for at, lab in enumerate(self.labs)]
        for lab, request in zip(self.labs, requests, strict=True):
            lab.departures.add(room)
            lab.expect(request, room)
            lab.send(request, room)
        return requests

    def run(self, requests, room: int = ROOM) -> None:
        """Admit the request, as SGLang does once it is draftable on both ranks."""
        for lab, request in zip(self.labs, requests, strict=True):
            assert lab.arrivals.is_draftable(room)
            lab.arrivals.land_anchors(room)
            lab.arrivals.admit(room, request.decode_pages[-1])
        self.check()

    def receive(self, *rooms: int) -> None:
        """Run the work of each worker in an iteration."""

        def receive(lab) -> None:
            lab.pump()
            lab.arrivals.land_together([r for r in rooms if lab.arrivals.is_pending(r)])

        list(self.pool.map(receive, self.labs))
        self.check()

    def check(self) -> None:
        """Check that the state which ranks plan by is the same on both."""
        for lab in self.labs:
            lab.decode.check_integrity()
        one, other = (lab.decode for lab in self.labs)
        pages = range(1, 13)
        assert [one.residuals.table.state(p) for p in pages] == [
            other.residuals.table.state(p) for p in pages
        ]
        assert [p in one.residuals.cache_slots for p in pages] == [
            p in other.residuals.cache_slots for p in pages
        ]
        assert [one.is_encoded(p) for p in pages] == [other.is_encoded(p) for p in pages]
        rooms = (ROOM, ROOM + 1)
        pending = [[lab.arrivals.is_pending(room) for room in rooms] for lab in self.labs]
        assert pending[0] == pending[1]

    def assert_right(self, requests) -> None:
        for lab, request in zip(self.labs, requests, strict=True):
            for actual, expected in zip(lab.target(request), (request.k, request.v), strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.fixture
def server(make_lab):
    made = Server(make_lab)
    yield made
    made.pool.shutdown()


def test_nothing_lands_on_one_rank_alone(server) -> None:
    first, second = server.labs
    requests = server.begin(LENGTH)
    first.link.deliver()
    first.pump()
    second.link.deliver([Stream.ANCHOR], at=range(PAGES))
    second.pump()
    assert first.arrivals.is_draftable(ROOM)
    assert not second.arrivals.is_draftable(ROOM)
    server.check()
    second.link.deliver([Stream.ANCHOR])
    second.pump()
    server.run(requests)
    server.receive(ROOM)
    assert first.arrivals.is_pending(ROOM), "the other rank has none of its residuals"
    # Residuals arrive out of order. The first two of four are among them.
    second.link.deliver([Stream.RESIDUAL], at=[0, 1, 3])
    server.receive(ROOM)
    assert first.arrivals.is_pending(ROOM)
    second.link.deliver([Stream.RESIDUAL])
    server.receive(ROOM)
    assert not first.arrivals.is_pending(ROOM)
    server.assert_right(requests)
    assert server.ranks.num_messages == 3
    server.receive(ROOM)
    assert server.ranks.num_messages == 3, "who is complete is known"


@pytest.mark.parametrize("seed", range(8))
def test_pages_may_arrive_in_any_order(server, seed) -> None:
    rng = random.Random(seed)
    requests = server.begin(LENGTH)
    for lab in server.labs:
        lab.link.deliver([Stream.ANCHOR])
        lab.pump()
    server.run(requests)
    for _ in range(3 * PAGES):
        for lab in server.labs:
            at = rng.sample(range(PAGES), rng.randrange(PAGES))
            lab.link.deliver([Stream.RESIDUAL], at=at)
            if rng.random() < 0.5:
                lab.pump()
        server.receive(ROOM)
    for lab in server.labs:
        lab.link.deliver()
    server.receive(ROOM)
    server.assert_right(requests)
    assert all(len(lab.arrivals) == 0 for lab in server.labs)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_request_that_fails_on_one_rank_fails_on_both(server, failing) -> None:
    requests = server.begin(LENGTH)
    for lab in server.labs:
        lab.link.deliver([Stream.ANCHOR])
        lab.pump()
    server.run(requests)
    lost, other = server.labs[failing], server.labs[1 - failing]
    # On the other rank all of the request has arrived.
    other.link.deliver()
    lost.link.to_receiver.append(TransferFailed(ROOM, "the sender was silent"))
    server.receive(ROOM)
    assert lost.arrivals.failure(ROOM) == "the sender was silent"
    assert other.arrivals.failure(ROOM) == ON_ANOTHER_RANK
    for lab, request in zip(server.labs, requests, strict=True):
        lab.arrivals.release(request.decode_pages)
        lab.decode.free_pages(request.decode_pages)
    server.check()
    assert not any(lab.arrivals.is_used(lab.receiver_end) for lab in server.labs)


@pytest.mark.parametrize("stream", list(Stream))
def test_a_page_of_another_size_is_noticed_before_it_lands(server, stream) -> None:
    requests = server.begin(LENGTH)
    first, second = server.labs
    key = SegmentKey(ROOM, stream, 1, 0)
    second.link.offers[key] = second.link.offers[key][:-1]
    for lab in server.labs:
        lab.link.deliver()
        lab.pump()
    assert "bytes, expected" in second.arrivals.failure(ROOM)
    assert not second.arrivals.is_draftable(ROOM)
    assert first.arrivals.is_draftable(ROOM)
    server.check()
    for lab, request in zip(server.labs, requests, strict=True):
        lab.arrivals.release(request.decode_pages)
    server.check()


def test_packed_residuals_with_raw_rows_too_many_are_noticed_before_they_land(make_lab) -> None:
    server = Server(make_lab, "packed")
    first, second = server.labs
    requests = server.begin(LENGTH)
    key = SegmentKey(ROOM, Stream.RESIDUAL, 1, 0)
    row = second.decode.codec.packed.raw_v_bytes
    second.link.offers[key] = memoryview(bytearray(second.link.offers[key]) + bytearray(row))
    for lab in server.labs:
        lab.link.deliver()
        lab.pump()
    assert first.arrivals.failure(ROOM) is None
    assert "more for each record that does not fit" in second.arrivals.failure(ROOM)
    server.check()
    for lab, request in zip(server.labs, requests, strict=True):
        lab.arrivals.release(request.decode_pages)
    server.check()
    server.pool.shutdown()


@pytest.mark.parametrize("arrives", ["before", "while set aside", "after"])
def test_a_retracted_request_resumes_alike_on_both_ranks(server, arrives) -> None:
    """The ranks lack different residuals of the request, but keep the same KV."""
    first, second = server.labs
    requests = server.begin(LENGTH)
    for lab in server.labs:
        lab.link.deliver([Stream.ANCHOR])
        lab.pump()
    server.run(requests)
    if arrives == "before":
        first.link.deliver()
        second.link.deliver([Stream.RESIDUAL], at=[0])
        server.receive(ROOM)
    kept = []
    for lab, request in zip(server.labs, requests, strict=True):
        kept.append(RetractedKV(lab.decode, lab.arrivals, request.decode_pages, LENGTH))
        lab.arrivals.release(request.decode_pages)
        lab.decode.free_pages(request.decode_pages)
    server.check()
    if arrives == "while set aside":
        first.link.deliver()
        first.pump()
    for lab, request, copy in zip(server.labs, requests, kept, strict=True):
        request.decode_pages = [page - 5 for page in request.decode_pages]
        copy.restore(request.decode_pages)
        lab.arrivals.admit(ROOM, request.decode_pages[-1])
    server.check()
    for lab in server.labs:
        lab.link.deliver()
    server.receive(ROOM)
    server.assert_right(requests)
    assert all(lab.link.cancelled == {} for lab in server.labs)


def test_a_request_that_is_complete_on_one_rank_can_be_dropped(server) -> None:
    """On that rank no transfer remains to be cancelled, and the room is free."""
    first, second = server.labs
    requests = server.begin(LENGTH)
    first.link.deliver()
    for lab in server.labs:
        lab.pump()
        lab.arrivals.drop(ROOM, NOT_NEEDED)
    assert first.link.cancelled == {}
    assert second.link.cancelled == {ROOM: NOT_NEEDED}
    server.check()
    first.expect(requests[0])


def test_a_link_that_ends_fails_incomplete_requests(server) -> None:
    first, second = server.labs
    server.begin(LENGTH)
    first.link.deliver()
    for lab in server.labs:
        lab.pump()
        lab.arrivals.fail_all_of(lab.receiver_end, "the prefill server is gone")
    assert first.arrivals.failure(ROOM) is None
    assert second.arrivals.failure(ROOM) == "the prefill server is gone"


@pytest.mark.parametrize("mode", ["full", "int8"])
def test_kv_in_one_piece(make_lab, mode) -> None:
    server = Server(make_lab, mode)
    requests = server.begin(LENGTH)
    for lab in server.labs:
        lab.link.deliver()
        lab.pump()
    assert all(lab.arrivals.is_pending(ROOM) for lab in server.labs)
    server.run(requests)
    assert not any(lab.arrivals.is_pending(ROOM) for lab in server.labs)
    if mode == "full":
        server.assert_right(requests)
    server.pool.shutdown()


def test_a_request_that_one_rank_aborts_is_encoded_on_both(make_lab) -> None:
    """On the prefill side the pages become a cached prefix."""
    labs = [make_lab() for _ in range(2)]
    for lab in labs:
        request = lab.request(LENGTH)
        lab.departures.add(ROOM)
        lab.expect(request)
    labs[1].departures.abort(ROOM, "given up")
    for lab in labs:
        lab.send(request)
    assert not labs[1].link.offers
    pages = request.prefill_pages
    assert [[lab.prefill.is_encoded(p) for p in pages] for lab in labs] == [
        [True] * PAGES + [False]
    ] * 2


def test_a_request_that_fails_on_one_rank_at_admission_lands_alike(server) -> None:
    """Both ranks have reported the request as draftable, so both keep its KV until SGLang ends
    it."""
    first, second = server.labs
    requests = server.begin(LENGTH)
    for lab in server.labs:
        lab.link.deliver([Stream.ANCHOR])
        lab.pump()
        assert lab.arrivals.is_draftable(ROOM)
    second.link.to_receiver.append(TransferFailed(ROOM, "the sender was silent"))
    second.pump()
    for lab in server.labs:
        lab.arrivals.land_anchors(ROOM)
    server.check()
    assert second.arrivals.failure(ROOM) == "the sender was silent"
    assert second.decode.is_encoded(requests[1].decode_pages[0])
    server.receive(ROOM)
    assert first.arrivals.failure(ROOM) == ON_ANOTHER_RANK


def test_a_complete_request_cannot_fail_on_one_rank(server) -> None:
    requests = server.begin(LENGTH)
    for lab in server.labs:
        lab.link.deliver()
        lab.pump()
    server.run(requests)
    server.receive(ROOM)
    server.labs[1].link.to_receiver.append(TransferFailed(ROOM, "too late"))
    server.receive(ROOM)
    assert [lab.arrivals.failure(ROOM) for lab in server.labs] == [None, None]
