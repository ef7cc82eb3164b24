"""The prefix cache over a GpuKVCache, whose streams advance in any order. Every hit reads the KV of
its tokens where kernels read."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvspec_testkit.kv.streams import ModelStreams
from sglang_kvspec.kv.copy_streams import SyncStream

SIZE = 32
NUM_PAGES = 10
# Pages of the longest request, which are all read at once.
CACHE_PAGES = 5
KINDS = [(target, store) for target in ("exact", "int8") for store in (False, True)]


@pytest.fixture
def device_machine(prefix_cache_machine, make_device_kv):
    class DeviceMachine(prefix_cache_machine):
        def __init__(self, kind, fault=None, **options):
            self.target, self.store = kind
            self.fault = fault
            super().__init__(make_device_kv, **options)

        def make_cache(self, make_kv):
            self.streams = ModelStreams()
            kv = make_kv(
                num_pages=NUM_PAGES,
                cache_pages=CACHE_PAGES if self.store else None,
                kept_anchor_pages=self.num_kept,
                window_pages=6,
                target=self.target,
                store=self.store,
                copy_streams=self.streams.copy_streams,
            )
            kv.encode_from = self.encode_from
            if self.fault is not None:
                self.fault(kv)
            return kv

        @rule(which=st.lists(st.integers(0, 2), max_size=8))
        def advance(self, which):
            self.streams.advance(which)

        def teardown(self):
            self.streams.drain()
            super().teardown()

        # Actions of kernels

        def encode_from(self, layer, k, v, source, slots):
            entries = (each.tolist() for each in (source, *slots))
            for place, page, slot in zip(*entries, strict=True):
                if page >= 0:
                    self.streams.main.do(partial(self.encode, k, v, place, page, slot))

        def encode(self, k, v, place, page, slot):
            record = self.kv.codec.encode(k[place][None], v[place][None])
            self.kv.anchors.layer(0)[page] = record.anchor[0]
            self.kv.residuals.cache_layer(0)[slot] = record.residual[0]

        def prefill(self, req, row, cached):
            kv, links = self.kv, self.links(req)
            pages = (row[::SIZE] // SIZE).tolist()
            new = range(cached // SIZE, len(pages))
            direct = [i for i in new if i < len(links) - 1]
            kv.open_pages(pages[i] for i in new if i not in direct)
            encodes = [pages[i] for i in direct]
            with kv.placed(pages[: cached // SIZE], encodes=encodes, by_layer=True):
                kv.await_layer(0)
                for i in direct:
                    k, v = self.content(links[i])
                    slots = kv.record_slots_of(torch.tensor([pages[i]]))
                    self.encode_from(0, k[None], v[None], torch.tensor([0]), slots)
            if links and len(links) - 1 in new:
                newest = pages[len(links) - 1]
                slot = kv.window.slots.slot_of(newest)
                for part, content in zip(kv.window.layer(0), self.content(links[-1]), strict=True):
                    self.streams.main.do(partial(part[slot].copy_, content))
                kv.commit_pages([newest])

        def check_content(self, req, slots):
            pages = (slots[::SIZE] // SIZE)[: len(slots) // SIZE].tolist()
            with self.kv.placed(pages, by_layer=True):
                self.kv.await_layer(0)
                for page, link in zip(pages, self.links(req), strict=False):
                    slot = int(self.kv.residual_slots[page])
                    self.streams.main.do(partial(self.check_page, page, slot, self.content(link)))

        def check_page(self, page, slot, content):
            record = self.kv.codec.encode(*content[:, None])
            for found, expected in (
                (self.kv.anchors.layer(0)[page], record.anchor[0]),
                (self.kv.residuals.cache_layer(0)[slot], record.residual[0]),
            ):
                assert torch.equal(found, expected), "foreign KV"

    return DeviceMachine


@pytest.mark.parametrize("num_kept", [0, 4])
@pytest.mark.parametrize(("target", "store"), KINDS)
def test_every_hit_reads_the_kv_of_its_tokens(device_machine, target, store, num_kept):
    limits = settings(max_examples=20, stateful_step_count=30)
    machine = partial(device_machine, (target, store), num_kept=num_kept)
    run_state_machine_as_test(machine, settings=limits)


@pytest.mark.parametrize(("target", "store"), [("exact", True), ("int8", False)])
def test_ranks_whose_tiers_drift_stay_together(device_machine, two_ranks, target, store):
    """Some pages are freed while copies into them run, because another rank could not load them."""

    class TwoDevices(two_ranks):
        def __init__(self):
            kind = target, store
            super().__init__(lambda _, **options: device_machine(kind, **options), None)

        @rule(rank=st.integers(0, 1), which=st.lists(st.integers(0, 2), max_size=8))
        def advance(self, rank, which):
            self.ranks[rank].advance(which)

    limits = settings(max_examples=20, stateful_step_count=40)
    run_state_machine_as_test(TwoDevices, settings=limits)


def use_all_tiers(machine):
    """A scripted run, in which the device is as late as possible."""

    def run_one():
        before = dict(machine.hits)
        machine.admit((0, 1, 0), 5, None)
        machine.finish(SimpleNamespace(draw=lambda _: machine.running[0]), True, False)
        return {tier for tier, num_tokens in machine.hits.items() if num_tokens > before[tier]}

    assert run_one() == set()
    assert run_one() == {"resident"}
    machine.evict(NUM_PAGES)
    assert run_one() == {"host"}
    machine.write()
    machine.flush()
    assert run_one() == {"disk"}
    assert machine.kept_hits == machine.num_kept * SIZE
    machine.teardown()


@pytest.mark.parametrize("num_kept", [0, 3])
@pytest.mark.parametrize("store", [False, True])
def test_tiers_below_the_tree_are_all_used(device_machine, store, num_kept):
    use_all_tiers(device_machine(("exact", store), residual_share=1.0, num_kept=num_kept))


def copies_of_the_device_are_early(kv):
    kv.records._copies._stream = SyncStream()


def rows_of_the_store_are_not_awaited(kv):
    if kv._offloaded is not None:
        kv._offloaded._copies.await_rows = lambda pages: None


def kept_anchors_are_late(kv):
    """Keep anchors on another stream than the main stream, so that other pages overwrite them
    before the copy."""
    right = kv.records.keep_anchors
    main = kv.records._copies._stream

    def keep_anchors(pages, slots):
        kv.records._copies._stream = kv._copy_streams.to_host
        right(pages, slots)
        kv.records._copies._stream = main

    kv.records.keep_anchors = keep_anchors


def residuals_land_in_other_slots(kv):
    right = kv.records.write_residuals
    kv.records.write_residuals = lambda pages, records: right(pages[::-1], records)


@pytest.mark.parametrize(
    ("fault", "num_kept"),
    [
        (copies_of_the_device_are_early, 0),
        (copies_of_the_device_are_early, 3),
        (rows_of_the_store_are_not_awaited, 0),
        (residuals_land_in_other_slots, 0),
        (kept_anchors_are_late, 3),
    ],
)
def test_a_fault_is_found(device_machine, fault, num_kept):
    options = {"residual_share": 1.0, "num_kept": num_kept}
    with pytest.raises(AssertionError, match="foreign KV"):
        use_all_tiers(device_machine(("exact", True), fault=fault, **options))
