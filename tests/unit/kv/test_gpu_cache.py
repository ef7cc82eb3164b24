"""The life of a page in GpuKVCache, whose kernels are replaced by a list of their calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_kvspec.core.errors import CapacityError, UnsupportedError

NUM_PAGES, LAYERS = 7, 2
subsets = st.sets(st.integers(1, NUM_PAGES), min_size=1, max_size=3)


def encode_directly(kv, pages):
    kv.begin_encode(pages)
    kv.finish_encode(pages)


def test_publishing_encodes_every_layer_from_the_window_and_keeps_the_page(make_device_kv):
    kv = make_device_kv(num_layers=3)
    kv.open_pages([4, 9, 2])
    kv.commit_pages([2, 9])
    slots = [kv.window.slots.slot_of(page) for page in (2, 9)]
    assert kv.encodings == [(layer, slots, [2, 9]) for layer in range(3)]
    assert [kv.is_encoded(page) for page in (4, 9, 2)] == [False, True, True]
    assert list(kv.window.slots) == [4, 9, 2]
    assert kv.window.committed_pages() == [9, 2]
    kv.check_integrity()


def test_more_pages_than_are_published_at_once(make_device_kv):
    kv = make_device_kv(num_pages=40, window_pages=40)
    pages = list(range(40, 0, -1))
    kv.open_pages(pages)
    kv.commit_pages(pages)
    found = [
        (slot, page)
        for layer, slots, ids in kv.encodings
        if layer == 0
        for slot, page in zip(slots, ids, strict=True)
    ]
    assert found == [(kv.window.slots.slot_of(page), page) for page in pages]


@pytest.mark.parametrize("options", [{}, {"store": True, "cache_pages": 3}])
def test_memory_is_what_the_plan_said(make_device_kv, options):
    kv = make_device_kv(**options)
    assert kv.hbm_nbytes == kv.plan.hbm_bytes


def test_publishing_nothing_launches_nothing(make_device_kv):
    kv = make_device_kv()
    kv.commit_pages([])
    assert kv.encodings == []


def test_a_page_is_published_once(make_device_kv):
    kv = make_device_kv()
    kv.open_pages([4])
    kv.commit_pages([4])
    with pytest.raises(AssertionError, match="already encoded"):
        kv.commit_pages([4])


def test_only_window_pages_are_published_and_only_published_ones_may_leave(make_device_kv):
    kv = make_device_kv()
    with pytest.raises(AssertionError, match="not in the recent window"):
        kv.commit_pages([4])
    kv.open_pages([4, 5])
    kv.commit_pages([4])
    with pytest.raises(AssertionError, match="only a committed page"):
        kv.move_out_of_window([4, 5])
    assert list(kv.window.slots) == [4, 5]
    kv.move_out_of_window([4])
    assert list(kv.window.slots) == [5]
    assert kv.is_encoded(4)
    kv.check_integrity()


def test_an_encoded_page_is_never_opened(make_device_kv):
    kv = make_device_kv()
    encode_directly(kv, [3])
    kv.open_pages([4])
    kv.commit_pages([4])
    for page in (3, 4):
        with pytest.raises(AssertionError, match="cannot be written"):
            kv.open_pages([page])
    with pytest.raises(AssertionError, match="not free"):
        kv.begin_encode([4])
    with pytest.raises(AssertionError, match="already encoded"):
        kv.begin_encode([3])


def test_the_oldest_published_page_makes_room(make_device_kv):
    kv = make_device_kv(window_pages=3)
    kv.open_pages([6, 4, 5])
    kv.commit_pages([5, 4])
    kv.open_pages([1])
    assert list(kv.window.slots) == [6, 5, 1]
    assert kv.is_encoded(4)
    assert kv.window.committed_pages() == [5]
    kv.open_pages([1, 2])
    with pytest.raises(CapacityError, match="all 3 pages"):
        kv.open_pages([3])
    kv.check_integrity()


def test_a_freed_page_starts_anew_wherever_it_was(make_device_kv):
    kv = make_device_kv()
    kv.open_pages([4, 5])
    kv.commit_pages([4])
    encode_directly(kv, [6])
    kv.free_pages([4, 5, 6, 7, 0])
    assert not any(map(kv.is_encoded, range(13)))
    assert len(kv.window.slots) == len(kv.residuals.cache_slots) == 0
    kv.check_integrity()
    kv.open_pages([4, 6])
    assert kv.window.committed_pages() == []
    kv.commit_pages([6])
    encode_directly(kv, [5])
    kv.check_integrity()


def test_residuals_of_all_pages_have_their_own_slots(make_device_kv):
    kv = make_device_kv(num_pages=5)
    assert kv.residual_slots.dtype == torch.int32
    # Page 0 is padding, and its entry only has to be a valid slot.
    assert kv.residual_slots.tolist() == [0, 0, 1, 2, 3, 4]
    assert len(kv.residuals.cache_layer(0)) == 5
    assert kv.residuals.cache_slots.table[1:].tolist() == kv.residual_slots[1:].tolist()


def test_what_kernels_are_given_fits_the_pools(make_device_kv, monkeypatch):
    from sglang_kvspec.kv import gpu_cache

    kv, calls = make_device_kv(num_layers=2, target="int8"), []
    monkeypatch.setattr(gpu_cache, "encode_pages", lambda *args: calls.append(args))
    kv.open_pages([9, 3])
    pages = torch.tensor([3, 12, -1], dtype=torch.int32)
    k, v = kv.window.layer(1)
    found = kv.record_slots_of(pages)
    gpu_cache.GpuKVCache.encode_from(kv, 1, k, v, torch.tensor([1, 0, -1]), found)
    (given,) = calls
    k_, v_, source, anchors, anchor_slots, residuals, slots, codec, target, kernels = given
    assert k_ is k
    assert v_ is v
    assert source.tolist() == [1, 0, -1]
    assert anchors is kv.anchors.layer(1)
    assert anchor_slots is pages
    assert residuals is kv.residuals.cache_layer(1)
    # Skipped entries have any valid slot.
    assert slots.tolist() == [2, 11, 0]
    assert (codec, target, kernels) == (kv.codec.settings, "int8", kv.kernels)


@pytest.mark.parametrize("options", [{}, {"store": True, "cache_pages": 6}])
def test_records_of_pages_with_and_without_a_place_for_anchors(make_device_kv, options):
    kv = make_device_kv(encodes=True, num_layers=LAYERS, anchor_pages=3, **options)
    assert kv.hbm_nbytes == kv.plan.hbm_bytes
    g, rng = kv.geometry, torch.Generator().manual_seed(0)
    content = {}

    def write(pages):
        shape = (2, len(pages), LAYERS, *g.page_shape)
        k, v = torch.randn(shape, generator=rng).to(g.dtype)
        content.update(zip(pages, zip(k, v, strict=True), strict=True))
        kv.write_whole(pages, k, v)

    def check(with_anchors):
        every = torch.tensor(sorted(content))
        assert every[kv.anchor_places.have(every)].tolist() == sorted(with_anchors)
        for page, (k, v) in content.items():
            assert torch.equal(torch.cat(kv.records.read_whole([page])), torch.stack((k, v)))
            record = kv.codec.encode(k, v)
            if page in with_anchors:
                place = kv.anchor_places.of(torch.tensor([page]))
                assert torch.equal(kv.anchors.read_pages(place)[0], record.anchor)
        kv.check_integrity()

    write([8, 3])
    kv.open_pages([5])
    for layer in range(LAYERS):
        for part in kv.window.layer(layer):
            part[kv.window.slots.slot_of(5)] = layer
    kv.commit_pages([5])
    write([11])
    check({8, 3})
    assert kv.anchor_places.have(torch.tensor([5, 11])).tolist() == [True, False]
    # A page gets the place of one that is freed, or that no draft reads.
    kv.free_anchors([8])
    kv.free_pages([3])
    del content[3]
    write([2, 9, 4])
    check({2, 9})
    kv.move_out_of_window([5])
    kv.free_all()
    kv.check_integrity()
    assert kv.anchor_places.num_taken == 0


def test_anchors_of_int8_are_not_freed(make_device_kv):
    kv = make_device_kv(target="int8", anchor_pages=3)
    with pytest.raises(AssertionError, match="int8 read anchors"):
        kv.free_anchors([1])


def test_fp32_is_refused(make_device_kv):
    with pytest.raises(UnsupportedError, match=r"bf16 or fp16, .*float32"):
        make_device_kv(dtype=torch.float32)
    assert make_device_kv(dtype=torch.float16).geometry.dtype == torch.float16


class DeviceKVMachine(RuleBasedStateMachine):
    """Random use against plain lists. `published`: pages that are encoded and in the window.
    `gone`: encoded pages that have left the window."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.window: list[int] = []
        self.published: set[int] = set()
        self.gone: set[int] = set()

    @initialize(window_pages=st.integers(1, 4))
    def build(self, window_pages):
        self.size = window_pages
        self.kv = self.make(num_pages=NUM_PAGES, num_layers=LAYERS, window_pages=window_pages)

    @rule(pages=subsets)
    def open(self, pages):
        for page in sorted(pages - self.published - self.gone - set(self.window)):
            if len(self.window) == self.size:
                leaving = next((p for p in self.window if p in self.published), None)
                if leaving is None:
                    with pytest.raises(CapacityError):
                        self.kv.open_pages([page])
                    return
                self.leave({leaving})
            self.kv.open_pages([page])
            self.window.append(page)

    @precondition(lambda self: set(self.window) - self.published)
    @rule(data=st.data())
    def publish(self, data):
        mutable = sorted(set(self.window) - self.published)
        pages = data.draw(st.lists(st.sampled_from(mutable), unique=True))
        before = len(self.kv.encodings)
        self.kv.commit_pages(pages)
        slots = [self.kv.window.slots.slot_of(page) for page in pages]
        wanted = [(layer, slots, pages) for layer in range(LAYERS)] if pages else []
        assert self.kv.encodings[before:] == wanted
        self.published.update(pages)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def move_out(self, data):
        pages = data.draw(st.sets(st.sampled_from(sorted(self.published))))
        self.kv.move_out_of_window(list(pages))
        self.leave(pages)

    @rule(pages=subsets)
    def encode(self, pages):
        pages -= self.gone | set(self.window)
        encode_directly(self.kv, sorted(pages))
        self.gone |= pages

    @rule(pages=subsets)
    def free(self, pages):
        self.kv.free_pages(pages)
        self.window = [page for page in self.window if page not in pages]
        self.published -= pages
        self.gone -= pages

    @invariant()
    def pools_agree(self):
        self.kv.check_integrity()
        assert list(self.kv.window.slots) == self.window
        assert set(self.kv.window.committed_pages()) == self.published
        encoded = {page for page in range(NUM_PAGES + 1) if self.kv.is_encoded(page)}
        assert encoded == self.published | self.gone == set(self.kv.residuals.cache_slots)

    def leave(self, pages):
        self.window = [page for page in self.window if page not in pages]
        self.published -= pages
        self.gone |= pages

    def teardown(self):
        if hasattr(self, "kv"):
            self.kv.free_all()
            self.kv.check_integrity()
            assert self.kv.window.slots.num_free == self.size
            assert self.kv.residuals.cache_slots.num_free == NUM_PAGES


def test_pages_under_random_use(make_device_kv):
    machine: Callable[[], DeviceKVMachine] = partial(DeviceKVMachine, make_device_kv)
    run_state_machine_as_test(machine, settings=settings(max_examples=40))
