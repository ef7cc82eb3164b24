"""KV from the pools of one GPU to those of another, as records and newest tokens. Full pages in the
window are encoded, too. Nothing is computed here: encoding means writing some records.
test_devices_in_one_piece.py tests KV that crosses in one piece."""

from __future__ import annotations

import pytest
import torch

from kvspec_testkit.kv.toy_prefixes import empty_records
from sglang_kvspec.kv.page_records import copy_out
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.disaggregation.arrivals import Arrivals
from sglang_kvspec.runtime.disaggregation.departures import Departures
from sglang_kvspec.runtime.disaggregation.handover import HandoverFormat
from sglang_kvspec.runtime.disaggregation.page_wire import SplitWire
from sglang_kvspec.runtime.disaggregation.retracted_kv import RetractedKV
from sglang_kvspec.transport import Stream

ROOM, SIZE = 7, 32
FIELDS = (b"first token     ",)
LENGTHS = (1, SIZE, SIZE + 1, 3 * SIZE, 4 * SIZE + 5)


class DeviceLab:
    """A prefill and a decode server on GPU pools. `kvs`: their KV caches. A prompt lies on `pages`
    of both."""

    def __init__(self, make, link, num_tokens, ranks=None, **options):
        shape = {"num_layers": 2, "num_pages": 12, "page_size": SIZE, "window_pages": 4}
        self.kvs = [make(**shape, **options) for _ in range(2)]
        self.link, self.num_tokens = link, num_tokens
        num_pages = -(-num_tokens // SIZE)
        self.pages = list(range(1, num_pages + 1)), list(range(12, 12 - num_pages, -1))
        prefill, decode = self.kvs
        page = prefill.plan.page_bytes
        handovers = HandoverFormat(
            prefill.geometry, tuple(map(len, FIELDS)), page.anchor + page.residual
        )
        self.departures = Departures(prefill, SplitWire(prefill), link.end("sender"), handovers)
        self.receiver_end = link.end("receiver")
        self.arrivals = Arrivals(decode, SplitWire(decode), handovers, mode="split", ranks=ranks)
        self.runs = False
        self.rng = torch.Generator().manual_seed(0)

    def prefill(self):
        """Write the prompt. Its last two pages are in the window, and encoded if they are full."""
        kv, pages = self.kvs[0], self.pages[0]
        for index, page in enumerate(pages):
            if index >= len(pages) - 2:
                kv.open_pages([page])
                slot = kv.window.slots.slot_of(page)
                for layer in range(kv.geometry.num_layers):
                    for part in kv.window.layer(layer):
                        part[slot] = torch.randn(part[slot].shape, generator=self.rng)
            if (index + 1) * SIZE <= self.num_tokens:
                encode(kv, page, self.rng)

    def send(self):
        self.departures.add(ROOM)
        self.arrivals.expect(ROOM, self.receiver_end, self.pages[1], 60.0)
        pages = self.pages[0]
        self.departures.note_prompt(ROOM, range(self.num_tokens))
        num_tail = self.num_tokens - SIZE * (len(pages) - 1)
        self.departures.send_last(ROOM, pages, num_tail, FIELDS)

    def deliver(self, *streams):
        self.link.deliver(streams)
        self.arrivals.pump(self.receiver_end)
        if self.runs and self.arrivals.is_pending(ROOM):
            self.arrivals.land_together([ROOM])
        self.kvs[1].check_integrity()

    def admit(self):
        assert self.arrivals.is_draftable(ROOM)
        self.arrivals.land_anchors(ROOM)
        self.runs = True
        return self.arrivals.admit(ROOM, self.pages[1][-1])

    def check_tail(self):
        num_tail = self.num_tokens - SIZE * (len(self.pages[0]) - 1)
        sent, got = (
            kv.records.read_plain(pages[-1], num_tail)
            for kv, pages in zip(self.kvs, self.pages, strict=True)
        )
        # Records are random bytes here, which include NaN, so compare bits.
        assert torch.equal(sent.view(torch.int16), got.view(torch.int16))

    def check_records(self, count):
        """Compare the records of the first `count` pages."""
        sent, got = (
            copy_out(kv, pages[:count]) for kv, pages in zip(self.kvs, self.pages, strict=True)
        )
        assert all(map(torch.equal, sent, got))

    def states(self):
        table = self.kvs[1].residuals.table
        return [table.state(page) for page in self.pages[1]]


def encode(kv, page, rng):
    """Encode a page as kernels do, in the window or not."""
    empty = empty_records(kv.geometry, kv.codec, 1)
    anchors, residuals = (
        torch.randint(256, part.shape[1:], generator=rng, dtype=torch.uint8) for part in empty
    )
    with kv.placed(encodes=[page]):
        slot = int(kv.residual_slots[page])
        for layer in range(kv.geometry.num_layers):
            kv.anchors.layer(layer)[page] = anchors[layer]
            kv.residuals.cache_layer(layer)[slot] = residuals[layer]


class AsMuch:
    """Ranks of which the others hold as much as this one."""

    size = 2

    def least(self, mine, about):
        return mine


@pytest.fixture(params=["all in GPU memory", "in a store", "in a store of a rank"])
def make_lab(request, make_device_kv, make_link):
    store = request.param != "all in GPU memory"
    ranks = AsMuch() if request.param == "in a store of a rank" else None

    def make(num_tokens, target="exact"):
        cache = 3 if store else None
        options = {"store": store, "cache_pages": cache, "target": target}
        lab = DeviceLab(make_device_kv, make_link(), num_tokens, ranks, **options)
        lab.prefill()
        return lab

    return make


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("target", ["exact", "int8"])
def test_anchors_then_residuals(make_lab, num_tokens, target):
    lab = make_lab(num_tokens, target)
    lab.send()
    lab.deliver(Stream.ANCHOR)
    assert lab.admit() is not None
    lab.check_tail()
    full = len(lab.pages[0]) - 1
    assert lab.states()[:full] == [ResidualState.IN_FLIGHT] * full
    lab.deliver(Stream.RESIDUAL)
    lab.check_records(full)
    assert len(lab.arrivals) == 0


def test_a_full_last_page_is_encoded_from_what_came(make_lab):
    """Verifications read only the records of full pages."""
    lab = make_lab(2 * SIZE)
    lab.send()
    lab.deliver(Stream.ANCHOR, Stream.RESIDUAL)
    lab.admit()
    decode, page = lab.kvs[1], lab.pages[1][-1]
    slot = decode.window.slots.slot_of(page)
    assert decode.encodings == [(layer, [slot], [page]) for layer in range(2)]
    assert decode.is_encoded(page)
    assert decode.window.is_committed(page)


@pytest.mark.parametrize("target", ["exact", "int8"])
def test_a_last_page_that_was_cached(make_lab, target):
    """SGLang has replaced the computed last page by another request's equal page, which has left
    the window. Drafts of the receiver still find the newest tokens in the window, if the records
    hold all their bits."""
    lab = make_lab(2 * SIZE, target)
    prefill, page = lab.kvs[0], lab.pages[0][-1]
    prefill.move_out_of_window([page])
    lab.send()
    lab.deliver(Stream.ANCHOR, Stream.RESIDUAL)
    lab.admit()
    # With several ranks, residuals that arrived before the request ran land only now.
    lab.deliver()
    assert (lab.pages[1][-1] in lab.kvs[1].window.slots) == (target == "exact")
    if target == "exact":
        lab.check_tail()
        lab.check_records(1)
    else:
        lab.check_records(2)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("arrives", ["before", "after"])
def test_a_retracted_request_resumes(make_lab, num_tokens, arrives):
    lab = make_lab(num_tokens)
    lab.send()
    lab.deliver(Stream.ANCHOR, *([Stream.RESIDUAL] if arrives == "before" else []))
    lab.admit()
    decode, pages = lab.kvs[1], lab.pages[1]
    # A full last page has been encoded. Its records are arbitrary here.
    last = copy_out(decode, pages[-1:]) if num_tokens % SIZE == 0 else None
    kept = RetractedKV(decode, lab.arrivals, pages, num_tokens)
    lab.arrivals.release(pages)
    decode.free_pages(pages)
    decode.check_integrity()
    pages[:] = [page - 5 for page in pages]
    kept.restore(pages)
    lab.arrivals.admit(ROOM, pages[-1])
    lab.deliver(Stream.RESIDUAL)
    lab.check_records(len(pages) - 1)
    if last is None:
        lab.check_tail()
    else:
        assert all(map(torch.equal, last, copy_out(decode, pages[-1:])))
    assert lab.link.cancelled == {}
