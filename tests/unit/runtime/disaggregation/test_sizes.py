"""Several ranks of a prefill server send to one rank of a decode server, which has the heads of
all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.disaggregation.arrivals import Arrivals
from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED
from sglang_kvspec.runtime.disaggregation.handover import HandoverFormat
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.runtime.disaggregation.retracted_kv import RetractedKV
from sglang_kvspec.transport import (
    JoinedLink,
    SegmentKey,
    Stream,
    TransferFailed,
)

ROOM, SIZE = 7, 32
HEADS = 2
LENGTH = 4 * SIZE + 5
LENGTHS = (1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, LENGTH)
LOSSLESS = ("split", "full")
MODES = (*LOSSLESS, "int8", "int4", "cachegen")
FIELDS = (b"first token     ", b"a log-probability")


class ManyToOne:
    """Several prefill ranks and one decode rank. `ranks` are labs whose prefill and decode sides
    have HEADS heads each. `arrivals` fills one KV cache, `kv`, with the heads of all, and `lab`
    reads it."""

    def __init__(
        self,
        make_lab: Callable[..., Any],
        make_kv: Callable[..., ReferenceKVCache],
        make_wire: Callable[..., PageWire],
        num_ranks: int,
        mode: str = "split",
        target: str = "exact",
    ) -> None:
        self.ranks = [make_lab(mode, target) for _ in range(num_ranks)]
        options = {"num_pages": 12, "num_layers": 2, "page_size": SIZE, "target": target}
        limits = {"window_pages": 3, "cache_pages": 2}
        self.kv = make_kv(num_kv_heads=num_ranks * HEADS, **options, **limits)
        self.lab = make_lab(mode, target)
        self.lab.decode = self.kv
        self.link = JoinedLink([lab.receiver_end for lab in self.ranks])
        page, sizes = self.kv.plan.page_bytes, tuple(map(len, FIELDS))
        self.mode = mode
        self.arrivals = Arrivals(
            self.kv,
            make_wire(self.kv, mode),
            HandoverFormat(self.kv.geometry, sizes, page.anchor + page.residual),
            mode=mode,
            clock=self.lab.clock,
        )

    def requests(self, num_tokens: int):
        """Return each rank's heads of a prefilled request."""
        return [lab.request(num_tokens, seed) for seed, lab in enumerate(self.ranks)]

    def begin(self, num_tokens: int, room: int = ROOM):
        requests = self.requests(num_tokens)
        self.expect(requests, room)
        for lab, request in zip(self.ranks, requests, strict=True):
            lab.departures.add(room)
            lab.send(request, room)
        return requests

    def expect(self, requests, room: int = ROOM) -> None:
        self.arrivals.expect(room, self.link, requests[0].decode_pages, 60.0)

    def pump(self) -> None:
        self.arrivals.pump(self.link)
        self.kv.check_integrity()

    def deliver(self) -> None:
        for lab in self.ranks:
            lab.link.deliver()
        self.pump()

    def move(self, requests) -> None:
        """Move each rank's heads to its own decode side."""
        for lab, request in zip(self.ranks, requests, strict=True):
            lab.move(request)

    def assert_reads_as(self, requests, equals) -> None:
        """Check that this decode server reads what the decode ranks of `equals` read together."""
        # Lossy KV is not drafted on.
        for read in ("target", "draft") if self.mode in LOSSLESS else ("target",):
            mine = getattr(self.lab, read)(requests[0])
            theirs = [
                getattr(lab, read)(request)
                for lab, request in zip(equals.ranks, requests, strict=True)
            ]
            for actual, parts in zip(mine, zip(*theirs, strict=True), strict=True):
                torch.testing.assert_close(actual, torch.cat(parts, dim=2), rtol=0, atol=0)


@pytest.fixture
def make(make_lab, make_kv, make_wire) -> Callable[..., ManyToOne]:
    return lambda *args, **options: ManyToOne(make_lab, make_kv, make_wire, *args, **options)


@pytest.fixture
def two(make) -> ManyToOne:
    return make(2)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_heads_arrive_in_their_places(make, num_ranks, mode, num_tokens) -> None:
    made, equals = make(num_ranks, mode), make(num_ranks, mode)
    requests = made.begin(num_tokens)
    made.deliver()
    assert made.arrivals.is_draftable(ROOM)
    assert made.arrivals.admit(ROOM, requests[0].decode_pages[-1]) is not None
    equals.move(equals.requests(num_tokens))
    made.assert_reads_as(requests, equals)
    if mode in LOSSLESS:
        k, _ = made.lab.target(requests[0])
        assert torch.equal(k, torch.cat([request.k for request in requests], dim=2))
    assert made.arrivals.wrong_prompt(ROOM, requests[0].token_ids) is None
    assert made.arrivals.fields(ROOM) == FIELDS
    assert len(made.arrivals) == 0
    for lab in made.ranks:
        lab.departures.pump()
        assert lab.departures.of(ROOM).ended == ""
        assert not lab.departures.outbox.num_ready_bytes


@pytest.mark.parametrize("target", ["exact", "int8"])
@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_last_page_that_is_encoded_already(make, target, num_pages) -> None:
    made, equals = make(2, target=target), make(2, target=target)
    for each in (made, equals):
        requests = each.requests(num_pages * SIZE)
        for lab, request in zip(each.ranks, requests, strict=True):
            lab.prefill.move_out_of_window(request.prefill_pages[-2:])
    made.expect(requests)
    for lab, request in zip(made.ranks, requests, strict=True):
        lab.departures.add(ROOM)
        lab.send(request)
    made.deliver()
    made.arrivals.admit(ROOM, requests[0].decode_pages[-1])
    equals.move(requests)
    made.assert_reads_as(requests, equals)


def test_a_page_lands_when_all_of_it_is_here(two) -> None:
    first, second = (lab.link for lab in two.ranks)
    requests = two.begin(LENGTH)
    first.deliver()
    second.deliver([Stream.ANCHOR], at=range(4))
    two.pump()
    assert not two.arrivals.is_draftable(ROOM), "the second handover is missing"
    second.deliver([Stream.ANCHOR])
    two.pump()
    assert two.arrivals.is_draftable(ROOM)
    two.arrivals.admit(ROOM, requests[0].decode_pages[-1])
    pages = requests[0].decode_pages
    assert all(map(two.kv.is_encoded, pages[:4]))
    assert two.arrivals.is_pending(ROOM)
    with pytest.raises(AssertionError, match="without a residual"):
        two.lab.target(requests[0])
    second.deliver([Stream.RESIDUAL], at=[2])
    two.pump()
    states = [two.kv.residuals.table.state(page) for page in pages[:4]]
    assert [state is ResidualState.IN_FLIGHT for state in states] == [True, True, False, True]
    assert two.arrivals.is_pending(ROOM)
    second.deliver()
    two.pump()
    assert not two.arrivals.is_pending(ROOM)
    summary = two.arrivals.summary(ROOM)
    sent = sum(lab.departures.of(ROOM).num_bytes for lab in two.ranks)
    assert sum(summary["bytes"].values()) == sent


@pytest.mark.parametrize("seed", range(12))
def test_parts_may_come_in_any_order(make, seed) -> None:
    """The request is also retracted and resumed while its parts arrive."""
    rng = random.Random(seed)
    made = make(rng.choice([2, 3]))
    requests = made.begin(LENGTH)
    draftable = aside = False
    while made.arrivals.is_pending(ROOM):
        lab = rng.choice(made.ranks)
        lab.link.deliver([rng.choice(list(Stream))], at=[rng.randrange(5)])
        made.pump()
        if not draftable and made.arrivals.is_draftable(ROOM):
            draftable = True
            made.arrivals.admit(ROOM, requests[0].decode_pages[-1])
        elif draftable and not aside and made.arrivals.is_pending(ROOM):
            aside = True
            pages = requests[0].decode_pages
            kept = RetractedKV(made.kv, made.arrivals, pages, LENGTH)
            made.kv.free_pages(pages)
            made.arrivals.release(pages)
            rng.choice(made.ranks).link.deliver()
            made.pump()
            kept.restore(pages)
            made.pump()
            made.arrivals.admit(ROOM, pages[-1])
    k, _ = made.lab.target(requests[0])
    assert torch.equal(k, torch.cat([request.k for request in requests], dim=2))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("streams", [[], [Stream.ANCHOR]])
def test_a_transfer_that_fails_in_one_part_fails_as_a_whole(two, rank, streams) -> None:
    requests = two.begin(LENGTH)
    for lab in two.ranks:
        lab.link.deliver(streams)
    two.pump()
    failing, other = two.ranks[rank], two.ranks[1 - rank]
    failing.link.expected.pop(ROOM)
    failing.link.to_receiver.append(TransferFailed(ROOM, "the sender was silent"))
    two.pump()
    two.pump()
    assert two.arrivals.failure(ROOM) == "the sender was silent"
    assert other.link.cancelled == {
        ROOM: "another part of the transfer failed: the sender was silent"
    }
    assert failing.link.cancelled == {}
    two.arrivals.drop(ROOM, NOT_NEEDED)
    assert not two.arrivals.is_used(two.link)
    two.kv.free_pages(requests[0].decode_pages)
    two.kv.check_integrity()
    two.expect(requests)


def test_a_dropped_request_is_cancelled_in_all_incomplete_parts(two) -> None:
    first, second = two.ranks
    requests = two.begin(LENGTH)
    first.link.deliver()
    two.pump()
    two.arrivals.release(requests[0].decode_pages)
    assert first.link.cancelled == {}, "it is complete there"
    assert second.link.cancelled == {ROOM: NOT_NEEDED}
    with pytest.raises(ValueError, match="in use"):
        two.expect(requests)
    two.pump()
    two.expect(requests)
    assert first.link.expected.keys() == second.link.expected.keys() == {ROOM}


@pytest.mark.parametrize(
    ("spoil", "index"),
    [
        (lambda request: range(1, LENGTH + 1), None),
        (None, 0),
        (None, 1),
    ],
    ids=["prompt", "first token", "room"],
)
def test_ranks_that_hand_over_different_requests_are_noticed(two, spoil, index) -> None:
    requests = two.requests(LENGTH)
    two.expect(requests)
    for rank, (lab, request) in enumerate(zip(two.ranks, requests, strict=True)):
        fields, token_ids = list(FIELDS), request.token_ids
        if rank and spoil is not None:
            token_ids = spoil(request)
        if rank and index is not None:
            fields[index] = fields[index][::-1]
        lab.departures.add(ROOM)
        lab.departures.note_prompt(ROOM, token_ids)
        lab.departures.send_last(ROOM, request.prefill_pages, 5, tuple(fields))
    two.deliver()
    assert not two.arrivals.is_draftable(ROOM)
    assert "sent handovers of different requests" in two.arrivals.failure(ROOM)


@pytest.mark.parametrize("stream", list(Stream))
def test_a_part_of_another_size_fails_its_request(two, stream) -> None:
    two.begin(LENGTH)
    key = SegmentKey(ROOM, stream, 0, 0)
    offers = two.ranks[1].link.offers
    offers[key] = offers[key][:-1]
    two.deliver()
    assert "bytes, expected" in two.arrivals.failure(ROOM)
