"""Records of pages that leave a GpuKVCache and land in one, on streams that advance in any order.

The main stream does the work of kernels: encode a page into its anchor and residual slot, and read
both.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
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

from kvspec_testkit.kv.streams import ModelEvent, ModelStreams
from kvspec_testkit.kv.toy_prefixes import empty_records
from sglang_kvspec.core.errors import CapacityError, PageStateError
from sglang_kvspec.kv import staged_records
from sglang_kvspec.kv.copy_streams import SyncStream
from sglang_kvspec.kv.page_records import PageRecords, copy_in, copy_out
from sglang_kvspec.kv.residual_table import ResidualState

NUM_PAGES, LAYERS = 7, 3
SHAPE = {"num_layers": LAYERS, "num_pages": NUM_PAGES, "num_kv_heads": 2, "head_dim": 16}
KINDS = [(target, store) for target in ("exact", "int8") for store in (False, True)]
subsets = st.sets(st.integers(1, NUM_PAGES), min_size=1, max_size=5)


class Device:
    """A GpuKVCache on modelled streams. `content`: records of a page, (anchors, residuals), each
    [LAYERS, heads, record_bytes]."""

    def __init__(self, make, **options):
        self.streams = ModelStreams()
        self.kv = make(copy_streams=self.streams.copy_streams, **(SHAPE | options))
        self.content: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rng = torch.Generator().manual_seed(0)

    def new_records(self, count):
        empty = empty_records(self.kv.geometry, self.kv.codec, count)
        return PageRecords(
            *(
                torch.randint(256, part.shape, generator=self.rng, dtype=torch.uint8)
                for part in empty
            )
        )

    def note(self, pages, records):
        self.content |= dict(zip(pages, zip(*records, strict=True), strict=True))

    def encode(self, *pages):
        records = self.new_records(len(pages))
        self.note(pages, records)
        with self.kv.placed(encodes=pages):
            for page, anchors, residuals in zip(pages, *records, strict=True):
                slot = int(self.kv.residual_slots[page])
                for layer in range(LAYERS):
                    for to, new in (
                        (self.kv.anchors.layer(layer)[page], anchors[layer]),
                        (self.kv.residuals.cache_layer(layer)[slot], residuals[layer]),
                    ):
                        self.streams.main.do(partial(to.copy_, new))

    def land(self, *pages):
        records = self.new_records(len(pages))
        copy_in(self.kv, pages, records)
        self.note(pages, records)

    def forward(self, *pages, by_layer=False):
        """Read these pages where kernels find them. Pages that are freed before the read are not
        compared, since others may have landed there."""
        with self.kv.placed(pages, by_layer=by_layer):
            for layer in range(LAYERS):
                self.kv.await_layer(layer)
                for page in pages:
                    records = anchors, residuals = self.content[page]
                    slot = int(self.kv.residual_slots[page])
                    for found, wanted in (
                        (self.kv.anchors.layer(layer)[page], anchors[layer]),
                        (self.kv.residuals.cache_layer(layer)[slot], residuals[layer]),
                    ):
                        self.streams.main.do(partial(self.read, page, records, found, wanted))

    def read(self, page, records, found, wanted):
        if self.content.get(page) is records:
            assert_same(found, wanted)

    def look(self, *pages):
        for page, *found in zip(pages, *copy_out(self.kv, pages), strict=True):
            for part, wanted in zip(found, self.content[page], strict=True):
                assert_same(part, wanted)

    def free(self, *pages):
        self.kv.free_pages(pages)
        for page in pages:
            self.content.pop(page, None)

    def state(self, page):
        return self.kv.residuals.table.state(page).name

    def finish(self):
        self.streams.drain()
        self.kv.check_integrity()
        self.look(*self.content)


def assert_same(found, wanted):
    assert torch.equal(found, wanted), "other bytes"


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    """Shrink the buffer to two pages at a time, or one."""
    monkeypatch.setattr(staged_records, "BUFFER_BYTES", 30_000)


@pytest.fixture
def device(make_device_kv):
    return partial(Device, make_device_kv)


@pytest.mark.parametrize(("target", "store"), KINDS)
def test_what_left_lands_in_other_pages(device, target, store):
    gpu = device(target=target, store=store, cache_pages=4 if store else None)
    gpu.encode(3, 6, 1)
    records = copy_out(gpu.kv, [6, 1, 3])
    wanted = [gpu.content[page] for page in (6, 1, 3)]
    gpu.free(6, 1, 3)
    copy_in(gpu.kv, [2, 3, 7], records)
    gpu.content = dict(zip((2, 3, 7), wanted, strict=True))
    gpu.forward(7, 2, 3, by_layer=True)
    gpu.look(3, 7)
    gpu.finish()


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
@pytest.mark.parametrize(("target", "store"), KINDS)
def test_pages_of_a_cpu_read_the_same_here(device, make_kv, codec, target, store):
    options = {"codec": codec, "target": target, "dtype": torch.bfloat16}
    cpu = make_kv(**SHAPE, **options, cache_pages=1)
    pages = torch.tensor([5, 2, 7])
    cpu.begin_encode(pages.tolist())
    rng = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        k, v = torch.randn((2, 3, 32, 2, 16), generator=rng).to(torch.bfloat16)
        cpu.encode(layer, pages, k, v)
    cpu.finish_encode(pages.tolist())
    records = copy_out(cpu, pages.tolist())
    gpu = device(codec=codec, target=target, store=store, cache_pages=3 if store else None)
    here = [1, 6, 2]
    copy_in(gpu.kv, here, records)
    with gpu.kv.placed(here, by_layer=True):
        pass
    gpu.streams.drain()
    for layer in range(LAYERS):
        read = gpu.kv.codec.decode_target(
            gpu.kv.anchors.layer(layer)[here],
            gpu.kv.residuals.cache_layer(layer)[gpu.kv.residual_slots[here]],
        )
        for part, wanted in zip(read, cpu.read_target(layer, pages), strict=True):
            assert torch.equal(part, wanted)
    again = copy_out(gpu.kv, here)
    assert all(map(torch.equal, again, records))


def test_landing_needs_no_room_in_the_cache(device):
    gpu = device(store=True, cache_pages=2)
    gpu.encode(1, 2)
    with gpu.kv.placed([1, 2]):
        gpu.land(3, 4, 5)
        assert [gpu.state(page) for page in (1, 2, 3, 4, 5)] == ["RESIDENT"] * 2 + ["STORED"] * 3
    gpu.forward(3, 5, by_layer=True)
    gpu.forward(1, 4)
    with pytest.raises(CapacityError):
        gpu.forward(3, 4, 5)
    gpu.finish()


def test_without_a_store_a_page_lands_in_its_own_slot(device):
    gpu = device()
    gpu.land(3, 4)
    assert [gpu.state(page) for page in (3, 4)] == ["RESIDENT"] * 2
    gpu.forward(3, 4)
    gpu.finish()


@pytest.mark.parametrize("store", [False, True])
def test_residuals_may_land_later(device, store):
    gpu = device(store=store, cache_pages=2 if store else None)
    records = gpu.new_records(3)
    gpu.kv.begin_landing([4, 6, 2])
    gpu.kv.records.write_anchors([4, 6, 2], records.anchors)
    gpu.kv.finish_anchors([4, 6, 2])
    assert all(map(gpu.kv.is_encoded, (4, 6, 2)))
    assert torch.equal(gpu.kv.records.read_anchors([2, 4]), records.anchors[[2, 0]])
    with pytest.raises(AssertionError, match="without a residual"):
        gpu.kv.records.read_residuals([4])
    gpu.encode(1)
    gpu.kv.records.write_residuals([6, 2], records.residuals[1:])
    gpu.kv.residuals.finish([6, 2])
    assert gpu.state(4) == "IN_FLIGHT"
    gpu.free(4)
    gpu.note([6, 2], PageRecords(records.anchors[1:], records.residuals[1:]))
    gpu.land(4)
    gpu.forward(6, 2)
    gpu.forward(4, 1)
    gpu.finish()


def test_a_copy_is_behind_what_still_writes_the_page(device):
    """The copy waits until all streams have done the work before it."""
    for store in (False, True):
        gpu = device(store=store)
        gpu.encode(2, 3)
        assert gpu.streams.main.num_left
        gpu.look(3, 2)


def test_a_landing_page_waits_for_the_copy_of_its_former_content(device):
    gpu = device(store=True)
    gpu.encode(2)
    gpu.free(2)
    # The write-through of the former content has not begun.
    gpu.land(2)
    gpu.streams.drain()
    gpu.look(2)
    gpu.forward(2)
    gpu.finish()


def test_a_page_may_land_where_a_forward_has_yet_to_read_one_that_was_freed(device):
    gpu = device(store=True, cache_pages=2)
    gpu.land(1)
    gpu.streams.exhaust(held=0)
    gpu.forward(1)
    gpu.free(1)
    gpu.land(1)
    gpu.forward(1)
    gpu.finish()


def test_a_fetch_of_a_freed_page_does_not_keep_the_next_one_from_landing(device):
    gpu = device(store=True, cache_pages=2)
    gpu.land(2)
    gpu.kv.residuals.start_fetch([2])
    gpu.free(2)
    gpu.land(2)
    gpu.forward(2)
    gpu.finish()


def test_only_free_pages_land_and_only_encoded_ones_leave(device):
    gpu = device(store=True)
    gpu.encode(3)
    gpu.kv.open_pages([4])
    for pages, message in (([3], "already encoded"), ([4], "not free")):
        with pytest.raises(AssertionError, match=message):
            gpu.land(*pages)
        with pytest.raises(AssertionError, match="only an encoded"):
            copy_out(gpu.kv, [3, 4])
    with pytest.raises(PageStateError):
        gpu.kv.begin_landing([5, 5])
    gpu.kv.begin_encode([6])
    with pytest.raises(AssertionError, match="a kernel writes"):
        gpu.kv.records.write_residuals([6], gpu.new_records(1).residuals)


@pytest.mark.parametrize("store", [False, True])
def test_no_page_at_all(device, store):
    gpu = device(store=store)
    gpu.land()
    records = copy_out(gpu.kv, [])
    empty = empty_records(gpu.kv.geometry, gpu.kv.codec, 0)
    assert [part.shape for part in records] == [part.shape for part in empty]


@pytest.mark.parametrize("store", [False, True])
def test_warming_up_leaves_pages_as_they_are(device, store):
    gpu = device(store=store)
    gpu.encode(1, 2)
    gpu.kv.records.warm_up()
    gpu.forward(1, 2)
    gpu.finish()


class RecordsMachine(RuleBasedStateMachine):
    def __init__(self, make, fault=None):
        super().__init__()
        self.make, self.fault = make, fault

    @initialize(kind=st.sampled_from(KINDS), cache_pages=st.integers(2, 4))
    def build(self, kind, cache_pages):
        target, store = kind
        self.has_store, self.size = store, cache_pages if store else NUM_PAGES
        self.gpu = Device(self.make, target=target, store=store, cache_pages=self.size)
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if self.fault:
            self.fault(self.gpu)

    def unused(self, pages):
        return sorted(pages - self.gpu.content.keys() - self.pending.keys())

    @rule(pages=subsets)
    def encode(self, pages):
        self.gpu.encode(*self.unused(pages)[:2])

    @rule(pages=subsets)
    def land(self, pages):
        self.gpu.land(*self.unused(pages)[::-1])

    @rule(pages=subsets)
    def land_anchors(self, pages):
        pages = self.unused(pages)
        records = self.gpu.new_records(len(pages))
        self.gpu.kv.begin_landing(pages)
        self.gpu.kv.records.write_anchors(pages, records.anchors)
        self.gpu.kv.finish_anchors(pages)
        self.pending |= dict(zip(pages, zip(*records, strict=True), strict=True))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def land_residuals(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.pending)), unique=True, min_size=1))
        records = torch.stack([self.pending[page][1] for page in pages])
        self.gpu.kv.records.write_residuals(pages, records)
        self.gpu.kv.residuals.finish(pages)
        self.gpu.content |= {page: self.pending.pop(page) for page in pages}

    @precondition(lambda self: self.gpu.content)
    @rule(data=st.data(), by_layer=st.booleans())
    def forward(self, data, by_layer):
        some = st.lists(st.sampled_from(sorted(self.gpu.content)), unique=True, max_size=self.size)
        self.gpu.forward(*data.draw(some), by_layer=by_layer)

    @precondition(lambda self: self.gpu.content)
    @rule(data=st.data())
    def leave(self, data):
        self.gpu.look(*data.draw(st.permutations(sorted(self.gpu.content))))

    @precondition(lambda self: self.has_store)
    @rule(data=st.data())
    def plan(self, data):
        """Evict and fetch as a plan would."""
        residuals = self.gpu.kv.residuals
        residuals.finish_fetches()
        in_cache = (ResidualState.RESIDENT, ResidualState.FETCHING)
        cached = [p for p in self.gpu.content if residuals.table.state(p) in in_cache]
        if cached:
            residuals.evict(data.draw(st.lists(st.sampled_from(cached), unique=True)))
        stored, room = residuals.missing(self.gpu.content), residuals.cache_slots.num_free
        if stored and room:
            some = st.lists(st.sampled_from(stored), unique=True, max_size=room)
            residuals.start_fetch(data.draw(some))

    @rule(pages=subsets)
    def free(self, pages):
        self.gpu.free(*pages)
        for page in pages:
            self.pending.pop(page, None)

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
            encoded = {page for page in range(NUM_PAGES + 1) if self.gpu.kv.is_encoded(page)}
            assert encoded == self.gpu.content.keys() | self.pending.keys()

    def teardown(self):
        if hasattr(self, "gpu"):
            self.gpu.finish()
            self.gpu.kv.free_all()
            self.gpu.kv.check_integrity()
            assert self.gpu.kv.residuals.cache_slots.num_free == self.size


def test_under_random_use(make_device_kv):
    limits = settings(max_examples=80, stateful_step_count=30)
    run_state_machine_as_test(partial(RecordsMachine, make_device_kv), settings=limits)


def anchors_do_not_wait_for_kernels(gpu):
    gpu.kv.records._copies._stream = SyncStream()


def nobody_waits_for_records(gpu):
    gpu.kv.records._copies._stream.mark = lambda: ModelEvent.__new__(Unawaited)


class Unawaited(ModelEvent):
    def synchronize(self):
        pass


def rows_are_not_awaited(gpu):
    if gpu.kv._offloaded is not None:
        gpu.kv._offloaded._copies.await_rows = lambda pages: None


def records_change_order(gpu):
    right = gpu.kv.records._copies._parts

    def parts(pool, slots):
        for part, buffer, rows, places in right(pool, slots):
            yield part, buffer, rows, places.flip(0)

    gpu.kv.records._copies._parts = parts


def the_buffer_is_sent_early(gpu):
    """Send the buffer on a stream without fences."""
    staged = gpu.kv.records._copies
    main, other = staged._stream, gpu.streams.to_device

    class Apart:
        copy_rows, mark = main.copy_rows, main.mark
        copy = other.copy

    staged._stream = Apart()


def landed_pages_are_said_to_be_cached(gpu):
    if gpu.kv._offloaded is not None:
        gpu.kv._offloaded.begin_landing = gpu.kv._offloaded.begin


def residuals_land_by_page_number(gpu):
    if gpu.kv._offloaded is None:
        last = gpu.kv.plan.num_pages - 1
        gpu.kv.residuals._slots_of = lambda pages: [min(page, last) for page in pages]


@pytest.mark.parametrize(
    "fault",
    [
        anchors_do_not_wait_for_kernels,
        nobody_waits_for_records,
        rows_are_not_awaited,
        records_change_order,
        the_buffer_is_sent_early,
        landed_pages_are_said_to_be_cached,
        residuals_land_by_page_number,
    ],
)
def test_a_fault_is_found(make_device_kv, fault):
    limits = settings(
        max_examples=200, stateful_step_count=40, phases=[Phase.generate], print_blob=False
    )
    with pytest.raises((AssertionError, PageStateError, CapacityError)):
        run_state_machine_as_test(partial(RecordsMachine, make_device_kv, fault), settings=limits)
