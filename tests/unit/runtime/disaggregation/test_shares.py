"""One rank of a prefill server sends to several ranks of a decode server, each of which has some of
its heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED, Departures
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import (
    ForkedLink,
    SegmentKey,
    SegmentReleased,
    TransferEnded,
    TransferFailed,
    TransferOpened,
)
from sglang_kvspec.transport.segments import Part, number_of, on_the_wire, part_of

ROOM, SIZE = 7, 32
HEADS = 2
LENGTH = 4 * SIZE + 5
LENGTHS = (1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, LENGTH)
LOSSLESS = ("split", "packed", "full")
MODES = (*LOSSLESS, "int8", "int4", "cachegen")


class Hub:
    """Sender's loop with several receivers, each on a link of its own."""

    def __init__(self, links) -> None:
        self._links = links

    def offer(self, key: SegmentKey, memory: memoryview) -> None:
        assert key.chunk == 0
        link = self._links[part_of(key.transfer).place]
        link.offer(key._replace(transfer=on_the_wire(key.transfer)), memory)

    def abort(self, transfer: int, reason: str) -> None:
        """Abort a transfer. An open transfer also ends on its link, at both ends."""
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
    """One prefill rank and several decode ranks. `lab` has a prefill side with the heads of all
    `ranks`, which are labs whose decode sides have HEADS heads each."""

    def __init__(
        self,
        make_lab: Callable[..., Any],
        make_kv: Callable[..., ReferenceKVCache],
        make_wire: Callable[..., PageWire],
        num_ranks: int,
        mode: str = "split",
        target: str = "exact",
        **limits: int,
    ) -> None:
        self.ranks = [make_lab(mode, target) for _ in range(num_ranks)]
        self.lab = make_lab(mode, target)
        options = self.lab.kv_options | {"num_kv_heads": num_ranks * HEADS}
        kv = make_kv(window_pages=3, cache_pages=2, **options)
        self.lab.prefill, self.mode = kv, mode
        link = ForkedLink(Hub([lab.link for lab in self.ranks]), harmless=[NOT_NEEDED])
        self.departures = self.lab.departures = Departures(
            kv, make_wire(kv, mode), link, self.lab.format, self.lab.clock, **limits
        )

    def begin(self, num_tokens: int):
        """Start the transfer of a request with the heads of all ranks. Return the request."""
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

    def assert_reads_as(self, whole, labs) -> None:
        """Check that each rank reads the same as the lab of equal place in `labs`, which received
        its heads alone."""
        for read in ("target", "draft") if self.mode in LOSSLESS else ("target",):
            for lab, other in zip(self.ranks, labs, strict=True):
                pairs = zip(getattr(lab, read)(whole), getattr(other, read)(whole), strict=True)
                for actual, expected in pairs:
                    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.fixture
def fork(make_lab, make_kv, make_wire) -> Callable[..., OneToMany]:
    return lambda *args, **options: OneToMany(make_lab, make_kv, make_wire, *args, **options)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_gets_its_heads(fork, make_lab, num_ranks, mode, num_tokens) -> None:
    made, labs = fork(num_ranks, mode), [make_lab(mode) for _ in range(num_ranks)]
    whole = made.begin(num_tokens)
    made.finish(whole)
    shares = (x.chunk(num_ranks, dim=2) for x in (whole.k, whole.v))
    for lab, k, v in zip(labs, *shares, strict=True):
        lab.move(lab.prefilled(k, v))
    made.assert_reads_as(whole, labs)
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
    made.lab.prefill.move_out_of_window(whole.prefill_pages[-2:])
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
    """Only a small part of a request is packed at a time."""
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
    reason = "another part of the transfer failed: the receiver was silent"
    assert other.arrivals.failure(ROOM) == reason


def test_an_aborted_request_ends_at_all_receivers(fork) -> None:
    made = fork(2)
    made.begin(LENGTH)
    made.departures.abort(ROOM, "given up")
    made.departures.pump()
    for lab in made.ranks:
        lab.pump()
        assert lab.arrivals.failure(ROOM) == "given up"
