"""Residuals between cache and pinned store of a GpuKVCache, on streams that advance in any order.

The main stream does the work of kernels: encode a page into its slot, and read a page from its
slot, by the table that kernels have.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvspec_testkit.kv.streams import ModelStreams
from sglang_kvspec.core.errors import CapacityError, PageStateError
from sglang_kvspec.kv.offloaded_residuals import OffloadedResidualCache
from sglang_kvspec.kv.residual_table import ResidualState

NUM_PAGES, LAYERS = 7, 2
subsets = st.sets(st.integers(1, NUM_PAGES), min_size=1, max_size=4)


class Kernels:
    """A GpuKVCache whose main stream writes a number for each page, and checks the number when it
    reads."""

    def __init__(self, make, **options):
        self.streams = ModelStreams()
        options = {"num_layers": LAYERS, "num_pages": NUM_PAGES} | options
        self.kv = make(store=True, copy_streams=self.streams.copy_streams, **options)
        self.residuals = self.kv.residuals
        self.content: dict[int, int] = {}
        self.clock = 0
        self.kv.encode_from = self.encode_from

    def encode_from(self, layer, k, v, source, slots):
        if layer == 0:
            # All pages have anchors, at their own numbers. Entries of -1 are skipped.
            for page in slots.anchors[slots.anchors >= 0].tolist():
                self.write(page)

    def write(self, page):
        self.clock = (self.clock + 1) % 250
        self.content[page] = self.clock
        slot = int(self.kv.residual_slots[page])
        self.streams.main.do(partial(self.residuals._cache.page(slot).fill_, self.clock))

    def read(self, page, layer):
        slot = int(self.kv.residual_slots[page])
        found, wanted = self.residuals._cache.layer(layer)[slot], self.content[page]

        def check():
            assert bool((found == wanted).all()), f"page {page} reads {found.unique().tolist()}"

        self.streams.main.do(check)

    def encode(self, *pages):
        with self.kv.placed(encodes=pages):
            for page in pages:
                self.write(page)

    def forward(self, pages, lent=(), by_layer=False):
        """Read encoded pages. Encode and read the `lent` pages for this forward only."""
        with self.kv.placed(pages, lends=lent, by_layer=by_layer):
            for page in lent:
                self.write(page)
            for layer in range(LAYERS):
                self.kv.await_layer(layer)
                for page in (*pages, *lent):
                    self.read(page, layer)
        for page in lent:
            del self.content[page]

    def finish(self):
        self.streams.drain()
        self.kv.check_integrity()
        for page, wanted in self.content.items():
            (row,) = self.residuals.store.read([page])
            assert bool((row == wanted).all()), f"the store has {row.unique().tolist()} of {page}"


@pytest.fixture
def kernels(make_device_kv):
    return partial(Kernels, make_device_kv)


def states(residuals, *pages):
    return [residuals.table.state(page).name for page in pages]


def test_new_pages_enter_the_cache_and_evict_those_used_longest_ago(kernels):
    gpu = kernels(cache_pages=3)
    gpu.encode(1, 2)
    gpu.encode(3)
    gpu.forward([1])
    gpu.encode(4, 5)
    assert states(gpu.residuals, 1, 2, 3, 4, 5) == [
        "RESIDENT",
        "STORED",
        "STORED",
        "RESIDENT",
        "RESIDENT",
    ]
    gpu.finish()


def test_a_forward_fetches_what_it_reads_and_waits_for_it_on_the_device(kernels):
    gpu = kernels(cache_pages=3)
    gpu.encode(1, 2, 3)
    gpu.encode(4)
    gpu.forward([1, 4, 2])
    assert states(gpu.residuals, 1, 2, 3, 4) == ["RESIDENT", "RESIDENT", "STORED", "RESIDENT"]
    assert gpu.residuals.bytes_fetched == gpu.kv.plan.page_bytes.residual
    gpu.finish()


def test_a_layer_does_not_wait_for_those_behind_it(kernels):
    gpu = kernels(cache_pages=3)
    gpu.encode(1, 2, 3)
    gpu.encode(4, 5)
    gpu.streams.drain()
    with gpu.kv.placed([1, 2], by_layer=True):
        gpu.kv.await_layer(0)
        gpu.read(1, 0)
        gpu.streams.main.step()
        # The fetch waits for a mark of the main stream, copies one layer of both pages, and sets a
        # mark.
        assert all(gpu.streams.to_device.step() for _ in range(4))
        while gpu.streams.main.step():
            pass
        assert not gpu.streams.main.num_left, "it waits for the second layer"
        assert gpu.streams.to_device.num_left
        gpu.kv.await_layer(1)
        gpu.read(2, 1)
    assert states(gpu.residuals, 1, 2) == ["RESIDENT", "RESIDENT"]
    gpu.finish()


def test_a_planned_fetch_is_not_repeated(kernels):
    gpu = kernels(cache_pages=2)
    gpu.encode(1, 2)
    gpu.residuals.evict([1, 2])
    gpu.residuals.start_fetch([2])
    assert states(gpu.residuals, 1, 2) == ["STORED", "FETCHING"]
    gpu.residuals.finish_fetches()
    assert states(gpu.residuals, 2) == ["FETCHING"], "it is on its way still"
    gpu.streams.drain()
    gpu.residuals.finish_fetches()
    assert states(gpu.residuals, 2) == ["RESIDENT"]
    gpu.forward([2, 1])
    assert gpu.residuals.bytes_fetched == 2 * gpu.kv.plan.page_bytes.residual
    gpu.finish()


def test_a_fetch_without_room_starts_nothing(kernels):
    gpu = kernels(cache_pages=2)
    gpu.encode(1, 2)
    gpu.encode(3)
    gpu.residuals.evict([3])
    with pytest.raises(CapacityError, match="2 residuals need cache slots, 1 are free"):
        gpu.residuals.start_fetch([1, 3])
    gpu.finish()


def test_a_forward_that_needs_more_than_the_cache_says_so(kernels):
    gpu = kernels(cache_pages=2)
    gpu.encode(1, 2)
    gpu.encode(3)
    with pytest.raises(CapacityError, match="one forward needs more residuals than the cache of 2"):
        gpu.forward([1, 2, 3])


def test_pages_of_the_present_forward_are_safe_from_those_it_encodes(kernels):
    gpu = kernels(cache_pages=3)
    gpu.encode(1, 2, 3)
    gpu.kv.residuals.require([1, 3])
    gpu.kv.begin_encode([4])
    assert states(gpu.residuals, 1, 2, 3) == ["RESIDENT", "STORED", "RESIDENT"]
    with pytest.raises(CapacityError):
        gpu.kv.begin_encode([5])


def test_lent_slots_come_back_after_the_forward(kernels):
    gpu = kernels(cache_pages=3)
    gpu.encode(1)
    gpu.kv.open_pages([2, 3])
    gpu.forward([1], lent=[2, 3])
    assert len(gpu.residuals.cache_slots) == 1
    gpu.kv.commit_pages([2])
    assert states(gpu.residuals, 1, 2, 3) == ["RESIDENT", "RESIDENT", "ABSENT"]
    gpu.finish()


def test_what_was_never_encoded_cannot_be_required(kernels):
    with pytest.raises(AssertionError, match="page 3 has no residual"):
        kernels(cache_pages=2).kv.residuals.require([3])


def test_a_cache_of_all_pages_never_moves_them(kernels):
    gpu = kernels(cache_pages=NUM_PAGES)
    gpu.encode(*range(1, NUM_PAGES + 1))
    gpu.forward(range(1, NUM_PAGES + 1))
    assert gpu.kv.residual_slots.tolist() == [0, *range(NUM_PAGES)]
    assert gpu.residuals.bytes_fetched == 0
    gpu.finish()


class OffloadedMachine(RuleBasedStateMachine):
    def __init__(self, make, fault=None):
        super().__init__()
        self.make, self.fault = make, fault

    @initialize(cache_pages=st.integers(2, 4))
    def build(self, cache_pages):
        self.size = cache_pages
        self.gpu = Kernels(self.make, cache_pages=cache_pages, window_pages=3)
        if self.fault:
            self.fault(self.gpu)

    def encoded(self, state=None):
        table = self.gpu.residuals.table
        return [
            page
            for page in range(1, NUM_PAGES + 1)
            if self.gpu.kv.is_encoded(page) and (state is None or table.state(page) is state)
        ]

    @rule(pages=subsets)
    def encode(self, pages):
        self.gpu.encode(*sorted(pages - set(self.gpu.kv.window.slots) - set(self.encoded()))[:2])

    @rule(pages=subsets, lent=st.integers(0, 1), by_layer=st.booleans())
    def forward(self, pages, lent, by_layer):
        spare = sorted(set(range(1, NUM_PAGES + 1)) - set(self.encoded()))[:lent]
        pages = sorted(pages & set(self.encoded()))[: self.size - len(spare)]
        self.gpu.forward(pages, spare, by_layer)

    @rule(page=st.integers(1, NUM_PAGES))
    def publish(self, page):
        window = self.gpu.kv.window.slots
        if self.gpu.kv.is_encoded(page) or not window.num_free:
            return
        self.gpu.kv.open_pages([page])
        self.gpu.kv.commit_pages([page])
        self.gpu.kv.move_out_of_window([page])

    @precondition(lambda self: self.encoded(ResidualState.STORED))
    @rule(data=st.data())
    def plan(self, data):
        """Evict and fetch as a plan would."""
        residuals = self.gpu.residuals
        residuals.finish_fetches()
        cached = self.encoded(ResidualState.RESIDENT) + self.encoded(ResidualState.FETCHING)
        if cached:
            residuals.evict(data.draw(st.lists(st.sampled_from(cached), unique=True)))
        stored, room = self.encoded(ResidualState.STORED), residuals.cache_slots.num_free
        if room:
            fetch = data.draw(st.lists(st.sampled_from(stored), unique=True, max_size=room))
            residuals.start_fetch(fetch)

    @rule(pages=subsets)
    def free(self, pages):
        self.gpu.kv.free_pages(pages)
        for page in pages:
            self.gpu.content.pop(page, None)

    @rule(which=st.lists(st.integers(0, 2), max_size=8))
    def advance(self, which):
        self.gpu.streams.advance(which)

    @rule(held=st.integers(0, 2))
    def all_but_one_go_on(self, held):
        self.gpu.streams.exhaust(held)

    @invariant()
    def pools_agree(self):
        if hasattr(self, "gpu"):
            self.gpu.kv.check_integrity()
            assert self.gpu.content.keys() == set(self.encoded())

    def teardown(self):
        if hasattr(self, "gpu"):
            self.gpu.finish()
            self.gpu.kv.free_all()
            self.gpu.kv.check_integrity()
            assert self.gpu.residuals.cache_slots.num_free == self.size


def test_under_random_use(make_device_kv):
    limits = settings(max_examples=80, stateful_step_count=30)
    run_state_machine_as_test(partial(OffloadedMachine, make_device_kv), settings=limits)


def no_wait_for_fetches(gpu):
    gpu.residuals._copies.main_waits = lambda events: list(events)


def no_wait_before_writing(gpu):
    gpu.residuals._copies.main_writes = lambda slots: None


def layers_do_not_wait(gpu):
    gpu.kv.await_layer = lambda layer: None


def not_written_through(gpu):
    gpu.residuals._copies.copy_out = lambda pairs: None


def kernels_are_not_told(gpu):
    gpu.residuals.slots_on_device = gpu.residuals.slots_on_device.clone()


def the_present_forward_is_not_safe(gpu):
    gpu.residuals._last_use = Amnesia()


class Amnesia:
    def __getitem__(self, page):
        return -1

    def __setitem__(self, page, now):
        pass


def freed_pages_arrive(gpu):
    gpu.residuals.release = lambda page: (
        gpu.residuals.table.release(page),
        gpu.residuals.cache_slots.release(page),
    )


@pytest.mark.parametrize(
    "fault",
    [
        no_wait_for_fetches,
        no_wait_before_writing,
        layers_do_not_wait,
        not_written_through,
        kernels_are_not_told,
        the_present_forward_is_not_safe,
        freed_pages_arrive,
    ],
)
def test_a_fault_is_found(make_device_kv, fault):
    limits = settings(
        max_examples=200, stateful_step_count=40, phases=[Phase.generate], print_blob=False
    )
    with pytest.raises((AssertionError, PageStateError, KeyError)):
        run_state_machine_as_test(partial(OffloadedMachine, make_device_kv, fault), settings=limits)


def test_warming_up_leaves_nothing(kernels):
    gpu = kernels(cache_pages=2)
    gpu.kv.warm_up()
    gpu.encode(1, 2)
    gpu.forward([1, 2])
    with pytest.raises(AssertionError, match="in use"):
        gpu.kv.warm_up()
    gpu.finish()


def test_a_device_kv_with_a_store_has_an_offloaded_cache(make_device_kv):
    assert isinstance(make_device_kv(store=True).residuals, OffloadedResidualCache)
    assert not isinstance(make_device_kv().residuals, OffloadedResidualCache)
