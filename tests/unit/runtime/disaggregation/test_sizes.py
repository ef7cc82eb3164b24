"""Several ranks of a prefill server send to one of a decode server, which has the heads of all; or
one to several, each of which has some of its heads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_kvspec.pools.residual_table import ResidualState
from sglang_kvspec.pools.tiered_kv import TieredKV
from sglang_kvspec.runtime.disaggregation.arrivals import Arrivals
from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED, Departures
from sglang_kvspec.runtime.disaggregation.handover import HandoverFormat
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.runtime.disaggregation.set_aside import SetAside
from sglang_kvspec.transport import (
    ForkedLink,
    JoinedLink,
    SegmentKey,
    SegmentReleased,
    Stream,
    TransferEnded,
    TransferFailed,
    TransferOpened,
)
from sglang_kvspec.transport.segments import Part, number_of, on_the_wire, part_of

ROOM, SIZE = 7, 32
HEADS = 2
LENGTH = 4 * SIZE + 5
LENGTHS = (1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, LENGTH)
LOSSLESS = ("split", "full")
MODES = (*LOSSLESS, "int8", "int4", "cachegen")
FIELDS = (b"first token     ", b"a log-probability")


class ManyToOne:
    """`ranks`: labs, of whose prefill sides each has HEADS heads. Their own decode sides have as
    many; `arrivals` fills one KV cache, `kv`, with the heads of all. `lab` reads it."""

    def __init__(
        self,
        make_lab: Callable[..., Any],
        make_kv: Callable[..., TieredKV],
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
        """Each rank's heads of a request that has been prefilled."""
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

    def assert_reads_as(self, requests, equals) -> None:
        """What is read here is what decode servers of as many ranks (equals) read together."""
        # Nobody drafts on what is lossy.
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


def of_equal_size(made: ManyToOne, requests) -> None:
    """The same requests between each rank and a decode rank of its own."""
    for lab, request in zip(made.ranks, requests, strict=True):
        lab.departures.add(ROOM)
        lab.expect(request)
        lab.send(request)
        lab.link.deliver()
        lab.pump()
        lab.arrivals.land_anchors(ROOM)
        lab.arrivals.admit(ROOM, request.decode_pages[-1])


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_heads_arrive_in_their_places(make, num_ranks, mode, num_tokens) -> None:
    made, equals = make(num_ranks, mode), make(num_ranks, mode)
    requests = made.begin(num_tokens)
    made.deliver()
    assert made.arrivals.is_draftable(ROOM)
    assert made.arrivals.admit(ROOM, requests[0].decode_pages[-1]) is not None
    of_equal_size(equals, equals.requests(num_tokens))
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
            lab.prefill.encode_window_pages(request.prefill_pages[-2:])
    made.expect(requests)
    for lab, request in zip(made.ranks, requests, strict=True):
        lab.departures.add(ROOM)
        lab.send(request)
    made.deliver()
    made.arrivals.admit(ROOM, requests[0].decode_pages[-1])
    of_equal_size(equals, requests)
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
    assert two.arrivals.is_lacking(ROOM)
    with pytest.raises(AssertionError, match="without a residual"):
        two.lab.target(requests[0])
    second.deliver([Stream.RESIDUAL], at=[2])
    two.pump()
    states = [two.kv.residuals.table.state(page) for page in pages[:4]]
    assert [state is ResidualState.IN_FLIGHT for state in states] == [True, True, False, True]
    assert two.arrivals.is_lacking(ROOM)
    second.deliver()
    two.pump()
    assert not two.arrivals.is_lacking(ROOM)
    summary = two.arrivals.summary(ROOM)
    sent = sum(lab.departures.of(ROOM).num_bytes for lab in two.ranks)
    assert sum(summary["bytes"].values()) == sent


@pytest.mark.parametrize("seed", range(12))
def test_parts_may_come_in_any_order(make, seed) -> None:
    """Also of one that is retracted on its way and brought back."""
    rng = random.Random(seed)
    made = make(rng.choice([2, 3]))
    requests = made.begin(LENGTH)
    draftable = aside = False
    while made.arrivals.is_lacking(ROOM):
        lab = rng.choice(made.ranks)
        lab.link.deliver([rng.choice(list(Stream))], at=[rng.randrange(5)])
        made.pump()
        if not draftable and made.arrivals.is_draftable(ROOM):
            draftable = True
            made.arrivals.admit(ROOM, requests[0].decode_pages[-1])
        elif draftable and not aside and made.arrivals.is_lacking(ROOM):
            aside = True
            pages = requests[0].decode_pages
            kept = SetAside(made.kv, made.arrivals, pages, LENGTH)
            made.kv.free_pages(pages)
            made.arrivals.release(pages)
            rng.choice(made.ranks).link.deliver()
            made.pump()
            kept.bring_back(pages)
            made.pump()
            made.arrivals.admit(ROOM, pages[-1])
    k, _ = made.lab.target(requests[0])
    assert torch.equal(k, torch.cat([request.k for request in requests], dim=2))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("streams", [[], [Stream.ANCHOR]])
def test_what_fails_in_one_part_fails_as_a_whole(two, rank, streams) -> None:
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
    assert other.link.cancelled == {ROOM: "another part of it failed: the sender was silent"}
    assert failing.link.cancelled == {}
    two.arrivals.drop(ROOM, NOT_NEEDED)
    assert not two.arrivals.is_used(two.link)
    two.kv.free_pages(requests[0].decode_pages)
    two.kv.check_integrity()
    two.expect(requests)


def test_one_that_is_dropped_is_cancelled_in_all_parts_that_are_under_way(two) -> None:
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
    assert "hand over different requests" in two.arrivals.failure(ROOM)


@pytest.mark.parametrize("stream", list(Stream))
def test_a_part_of_another_size_fails_its_request(two, stream) -> None:
    two.begin(LENGTH)
    key = SegmentKey(ROOM, stream, 0, 0)
    offers = two.ranks[1].link.offers
    offers[key] = offers[key][:-1]
    two.deliver()
    assert "another size" in two.arrivals.failure(ROOM)


class Hub:
    """What a SenderLoop is to several receivers: each has a link of its own."""

    def __init__(self, links) -> None:
        self._links = links

    def offer(self, key: SegmentKey, memory: memoryview) -> None:
        assert key.chunk == 0
        link = self._links[part_of(key.transfer).place]
        link.offer(key._replace(transfer=on_the_wire(key.transfer)), memory)

    def abort(self, transfer: int, reason: str) -> None:
        """Of one that was opened its end is told, too, and to its receiver."""
        number, link = on_the_wire(transfer), self._links[part_of(transfer).place]
        link.abort(number, reason)
        if link.expected.pop(number, None) is not None:
            link.to_receiver.append(TransferFailed(number, reason))
            link.to_sender.append(TransferEnded(number, reason))

    def take_events(self) -> list:
        events = []
        for place, link in enumerate(self._links):
            part = Part(place, len(self._links))
            for event in link.end("sender").take_events():
                if isinstance(event, SegmentReleased):
                    number = number_of(event.key.transfer, part)
                    events.append(SegmentReleased(event.key._replace(transfer=number)))
                elif isinstance(event, TransferOpened):
                    events.append(TransferOpened(number_of(event.transfer, part)))
                else:
                    events.append(TransferEnded(number_of(event.transfer, part), event.reason))
        return events


class OneToMany:
    """`lab` has a prefill side with the heads of all `ranks`, labs whose decode sides have HEADS
    each."""

    def __init__(
        self,
        make_lab: Callable[..., Any],
        make_kv: Callable[..., TieredKV],
        make_wire: Callable[..., PageWire],
        num_ranks: int,
        mode: str = "split",
        target: str = "exact",
        **limits: int,
    ) -> None:
        self.ranks = [make_lab(mode, target) for _ in range(num_ranks)]
        self.lab = make_lab(mode, target)
        options = {"num_pages": 12, "num_layers": 2, "page_size": SIZE, "target": target}
        kv = make_kv(num_kv_heads=num_ranks * HEADS, window_pages=3, cache_pages=2, **options)
        self.lab.prefill, self.mode = kv, mode
        link = ForkedLink(Hub([lab.link for lab in self.ranks]), harmless=[NOT_NEEDED])
        self.departures = self.lab.departures = Departures(
            kv, make_wire(kv, mode), link, self.lab.format, self.lab.clock, **limits
        )

    def begin(self, num_tokens: int):
        """The request with all heads, and of each rank."""
        whole = self.lab.request(num_tokens)
        self.open(whole)
        self.departures.add(ROOM)
        self.lab.send(whole)
        return whole

    def open(self, whole) -> None:
        for lab in self.ranks:
            lab.expect(whole)

    def finish(self, whole) -> None:
        for lab in self.ranks:
            lab.link.deliver()
            lab.pump()
            assert lab.arrivals.admit(ROOM, whole.decode_pages[-1]) is not None
        self.departures.pump()

    def assert_reads_as(self, whole, equals: ManyToOne) -> None:
        """What each rank reads is what it reads from a prefill rank with its heads alone."""
        for read in ("target", "draft") if self.mode in LOSSLESS else ("target",):
            for lab, other in zip(self.ranks, equals.ranks, strict=True):
                pairs = zip(getattr(lab, read)(whole), getattr(other, read)(whole), strict=True)
                for actual, expected in pairs:
                    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.fixture
def fork(make_lab, make_kv, make_wire) -> Callable[..., OneToMany]:
    return lambda *args, **options: OneToMany(make_lab, make_kv, make_wire, *args, **options)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_gets_its_heads(fork, make, num_ranks, mode, num_tokens) -> None:
    made, equals = fork(num_ranks, mode), make(num_ranks, mode)
    whole = made.begin(num_tokens)
    made.finish(whole)
    heads = zip(*(x.chunk(num_ranks, dim=2) for x in (whole.k, whole.v)), strict=True)
    of_equal_size(
        equals, [lab.prefilled(k, v) for lab, (k, v) in zip(equals.ranks, heads, strict=True)]
    )
    made.assert_reads_as(whole, equals)
    if mode in LOSSLESS:
        read = [lab.target(whole)[0] for lab in made.ranks]
        assert torch.equal(torch.cat(read, dim=2), whole.k)
    assert made.departures.of(ROOM).ended == ""
    assert not made.departures.outbox.num_ready_bytes


@pytest.mark.parametrize("target", ["exact", "int8"])
@pytest.mark.parametrize("num_pages", [1, 3])
def test_each_gets_its_heads_of_an_encoded_last_page(fork, target, num_pages) -> None:
    made = fork(2, target=target)
    whole = made.lab.request(num_pages * SIZE)
    made.lab.prefill.encode_window_pages(whole.prefill_pages[-2:])
    made.open(whole)
    made.departures.add(ROOM)
    made.lab.send(whole)
    made.finish(whole)
    ids = torch.tensor(whole.prefill_pages)
    for layer in range(2):
        sent = made.lab.prefill.read_target(layer, ids)
        got = [lab.decode.read_target(layer, 12 - ids) for lab in made.ranks]
        for all_heads, parts in zip(sent, zip(*got, strict=True), strict=True):
            assert torch.equal(torch.cat(parts, dim=-2), all_heads)


def test_a_request_is_open_once_all_have_asked(fork) -> None:
    made = fork(2)
    whole = made.lab.request(LENGTH)
    departure = made.departures.add(ROOM)
    for lab, is_open in zip(made.ranks, (False, True), strict=True):
        lab.expect(whole)
        made.departures.pump()
        assert departure.is_open is is_open
    assert departure.num_parts == 2


def test_memory_is_used_again_once_all_have_a_portion(fork) -> None:
    """Little of a request lies ready at a time."""
    made = fork(2, ready_bytes=1)
    whole = made.begin(LENGTH)
    outbox = made.departures.outbox
    assert len(made.ranks[0].link.offers) == 3, "an anchor, a residual, the handover"
    made.ranks[0].link.deliver()
    before = outbox.num_ready_bytes
    made.departures.pump()
    assert outbox.num_ready_bytes == before > 0
    for _ in range(4):
        for lab in made.ranks:
            lab.link.deliver()
        made.departures.pump()
    made.finish(whole)
    assert outbox.num_ready_bytes == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_one_receiver_that_fails_ends_all(fork, rank) -> None:
    made = fork(2)
    made.begin(LENGTH)
    failing, other = made.ranks[rank], made.ranks[1 - rank]
    failing.link.expected.pop(ROOM)
    failing.link.to_sender.append(TransferEnded(ROOM, "the receiver was silent"))
    made.departures.pump()
    made.departures.pump()
    assert made.departures.of(ROOM).ended == "the receiver was silent"
    other.pump()
    reason = "another part of it failed: the receiver was silent"
    assert other.arrivals.failure(ROOM) == reason


def test_one_that_is_given_up_here_ends_at_all(fork) -> None:
    made = fork(2)
    made.begin(LENGTH)
    made.departures.abort(ROOM, "given up")
    made.departures.pump()
    for lab in made.ranks:
        lab.pump()
        assert lab.arrivals.failure(ROOM) == "given up"
