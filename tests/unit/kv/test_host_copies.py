"""Copies between cache and store on streams that advance in any order. The contents are compared
bit by bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvspec_testkit.kv.streams import ModelStreams
from sglang_kvspec.kv.copy_streams import CopyStreams, SyncStream, make_copy_streams
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.host_store import RawStore
from sglang_kvspec.kv.record_pool import RecordPool

NUM_PAGES, NUM_SLOTS, LAYERS = 4, 3, 2
CPU = torch.device("cpu")


def pool(num_slots):
    made = RecordPool(LAYERS, num_slots, 1, 16, CPU, by_page=True)
    for slot in range(num_slots):
        made.page(slot).fill_(255)
    return made


def test_pages_come_and_go_by_page_and_slot():
    cache, store = pool(8), pool(8)
    for page in range(8):
        store.page(page).fill_(page)
    copies = HostCopies(
        RawStore(cache, store), CopyStreams(SyncStream(), SyncStream(), SyncStream())
    )
    copies.fetch([(4, 1), (2, 5), (3, 6), (5, 2), (7, 0), (6, 3)])
    found = [int(cache.page(slot)[0, 0, 0]) for slot in range(7)]
    assert found == [7, 4, 5, 6, 255, 2, 3]
    assert copies.take_fetch_times()[0][0] == 6 * cache.page(0).nbytes
    copies.copy_out([(0, 5), (1, 6)])
    assert int(store.page(1)[0, 0, 0]) == 3


class CopyMachine(RuleBasedStateMachine):
    """Random copies. `slot_of`: slots of cached pages. `version`: content of each page, unique
    among all pages."""

    def __init__(self, deaf=(), forget=()):
        super().__init__()
        self.cache, self.store = pool(NUM_SLOTS), pool(NUM_PAGES)
        self.streams = ModelStreams()
        for stream, other in deaf:
            getattr(self.streams, stream).deaf_to += (getattr(self.streams, other),)
        self.copies = HostCopies(RawStore(self.cache, self.store), self.streams.copy_streams)
        for name in forget:
            setattr(self.copies, name, Forgetful())
        self.slot_of: dict[int, int] = {}
        self.arriving: dict[int, object] = {}
        self.version: dict[int, int] = {}
        self.clock = 0

    def free_slots(self):
        return sorted(set(range(NUM_SLOTS)) - set(self.slot_of.values()))

    def stored_only(self):
        return sorted(self.version.keys() - self.slot_of.keys())

    def unborn(self):
        return sorted(set(range(NUM_PAGES)) - self.version.keys())

    @precondition(lambda self: self.free_slots() and self.unborn())
    @rule(data=st.data())
    def encode(self, data):
        page = data.draw(st.sampled_from(self.unborn()))
        slot = data.draw(st.sampled_from(self.free_slots()))
        self.clock = (self.clock + 1) % 250
        self.version[page], self.slot_of[page] = self.clock, slot
        self.copies.main_writes([slot])
        self.streams.main.do(partial(self.cache.page(slot).fill_, self.clock))
        self.copies.copy_out([(page, slot)])

    @precondition(lambda self: self.free_slots() and self.stored_only())
    @rule(data=st.data(), for_use=st.booleans())
    def fetch(self, data, for_use):
        pages = data.draw(st.lists(st.sampled_from(self.stored_only()), unique=True, min_size=1))
        # Fetch as many pages as there is room for.
        pairs = list(zip(pages, data.draw(st.permutations(self.free_slots())), strict=False))
        event = self.copies.fetch(pairs)
        self.slot_of |= dict(pairs)
        self.arriving |= {page: event for page, _ in pairs}
        if for_use:
            self.read(pairs[0][0])

    @precondition(lambda self: self.slot_of)
    @rule(data=st.data())
    def use(self, data):
        self.read(data.draw(st.sampled_from(sorted(self.slot_of))))

    @precondition(lambda self: self.slot_of)
    @rule(data=st.data())
    def evict(self, data):
        """Evict a page, although copies of it may still run."""
        page = data.draw(st.sampled_from(sorted(self.slot_of)))
        del self.slot_of[page]
        self.arriving.pop(page, None)

    @precondition(lambda self: not self.unborn())
    @rule(data=st.data())
    def die(self, data):
        page = data.draw(st.sampled_from(sorted(self.version)))
        del self.version[page]
        self.slot_of.pop(page, None)
        self.arriving.pop(page, None)

    def read(self, page):
        if page in self.arriving:
            self.copies.main_waits([self.arriving.pop(page)])
        expected, found = self.version[page], self.cache.page(self.slot_of[page])
        self.streams.main.do(partial(check, found, expected))

    @rule(which=st.lists(st.integers(0, 2), max_size=8))
    def advance(self, which):
        self.streams.advance(which)

    @rule(held=st.integers(0, 2))
    def all_but_one_go_on(self, held):
        self.streams.exhaust(held)

    def teardown(self):
        self.streams.drain()
        for page, version in self.version.items():
            check(self.store.page(page), version)
        for page, slot in self.slot_of.items():
            check(self.cache.page(slot), self.version[page])


class Forgetful(dict):
    def __setitem__(self, key, value):
        pass

    def setdefault(self, key, default=None):
        return default


def check(found, version):
    assert bool((found == version).all()), f"{found.unique().tolist()} instead of {version}"


def test_contents_whatever_order_the_streams_advance_in():
    limits = settings(max_examples=100, stateful_step_count=40)
    run_state_machine_as_test(CopyMachine, settings=limits)


FAULTS = {
    "a copy out before the encode": {"deaf": [("to_host", "main")]},
    "a fetch into a slot that kernels still read": {"deaf": [("to_device", "main")]},
    "a fetch before the copy out, or into a slot that it reads": {
        "deaf": [("to_device", "to_host")]
    },
    "a kernel that does not wait for a fetch": {"deaf": [("main", "to_device")]},
    "a kernel that writes a slot being copied out": {"deaf": [("main", "to_host")]},
    "rows whose copies out are forgotten": {"forget": ["_row_written"]},
    "slots whose copies are forgotten": {"forget": ["_slot_uses"]},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_missing_fence_is_found(fault):
    limits = settings(
        max_examples=300, stateful_step_count=40, phases=[Phase.generate], print_blob=False
    )
    with pytest.raises(AssertionError, match="instead of"):
        run_state_machine_as_test(partial(CopyMachine, **fault), settings=limits)


def test_copies_given_together_are_waited_for_once():
    streams = ModelStreams()
    copies = HostCopies(RawStore(pool(3), pool(3)), streams.copy_streams)
    copies.copy_out([(0, 0), (1, 1), (2, 2)])
    copies.main_writes([0, 1, 2])
    assert streams.main.num_left == 2, "its own mark, and one wait"
    streams.drain()
    copies.fetch([(0, 1)])
    assert streams.to_device.num_left == 4, "the main stream's mark, a mark, a copy, a mark"
    streams.drain()


def test_nothing_to_copy_does_nothing():
    streams = ModelStreams()
    HostCopies(RawStore(pool(1), pool(1)), streams.copy_streams).copy_out([])
    assert not any(stream.num_left for stream in streams.all)


def test_without_a_gpu_copies_are_done_when_asked_for():
    cache, store = pool(2), pool(2)
    copy_streams = make_copy_streams(CPU)
    assert isinstance(copy_streams.main, SyncStream)
    copies = HostCopies(RawStore(cache, store), copy_streams)
    cache.page(1).fill_(3)
    copies.copy_out([(0, 1)])
    copies.main_writes([1])
    assert copies.fetch([(0, 0)]).query()
    check(cache.page(0), 3)


def test_fetches_are_timed_without_their_fences_and_only_once_they_are_over():
    streams = ModelStreams()
    copies = HostCopies(RawStore(pool(3), pool(3)), streams.copy_streams)
    # A step of a modelled stream takes a second. The fetch waits for seven steps.
    for _ in range(7):
        streams.main.do(lambda: None)
    copies.fetch([(0, 1), (1, 0)])
    copies.fetch([(2, 2)])
    assert copies.take_fetch_times() == []
    while streams.main.step():
        pass
    # Behind the fence: a mark, two copies and a mark.
    for _ in range(5):
        assert streams.to_device.step()
    page_bytes = pool(1).page(0).nbytes
    assert copies.take_fetch_times() == [(2 * page_bytes, 3.0)]
    streams.drain()
    assert copies.take_fetch_times() == [(page_bytes, 2.0)]
    assert copies.take_fetch_times() == []


class DoubtfulStore(RawStore):
    """Store whose pages are doubtful until they are settled. Pages may be settled once their copies
    are done."""

    def __init__(self, cache, rows, streams):
        super().__init__(cache, rows)
        self.rows, self.streams = rows, streams
        self.settled = []

    def doubtful(self, pages):
        return [page for page in pages if page not in self.settled]

    def settle(self, stream, pages, slots):
        assert stream is self.streams.to_host
        for page, slot in zip(pages, slots, strict=True):
            check(self.rows.page(page), slot)
        self.settled += pages


def test_pages_are_settled_once_they_were_copied():
    streams, cache, rows = ModelStreams(), pool(3), pool(3)
    for slot in range(3):
        cache.page(slot).fill_(slot)
    store = DoubtfulStore(cache, rows, streams)
    copies = HostCopies(store, streams.copy_streams)
    copies.copy_out([(0, 2), (1, 0)])
    copies.copy_out([(2, 1)])
    slot_of = {0: 2, 1: 0, 2: 1}.__getitem__
    copies.settle([1, 0], slot_of)
    assert store.settled == [1, 0]
    assert streams.to_host.num_left, "the copy of another page need not be done"
    copies.settle([1, 2], slot_of)
    assert store.settled == [1, 0, 2]
