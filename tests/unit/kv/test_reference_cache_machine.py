"""ReferenceKVCache under random use returns what was written, and the machine finds faults in
it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from sglang_kvspec.core.errors import PageStateError
from sglang_kvspec.kv.anchor_places import AnchorPlaces
from sglang_kvspec.kv.decoded_anchors import DecodedAnchors
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.kv.residual_cache import ResidualCache
from sglang_kvspec.kv.residual_table import ResidualTable


@pytest.mark.parametrize("store", [True, False])
def test_reads_with_fewer_places_for_anchors_than_pages(reference_kv_machine, store):
    machine = reference_kv_machine(store=store, anchor_pages=3)
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=30))


@pytest.mark.parametrize(
    ("codec", "target", "dtype", "store"),
    [
        ("log4", "exact", torch.bfloat16, True),
        ("log4", "exact", torch.float32, True),
        ("log4", "int8", torch.float32, True),
        ("uniform4", "exact", torch.bfloat16, True),
        ("uniform4", "exact", torch.float32, True),
        ("uniform4", "int8", torch.float32, True),
        ("uniform4", "int8", torch.bfloat16, False),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_reads_equal_the_full_precision_copies(reference_kv_machine, codec, target, dtype, store):
    machine = reference_kv_machine(codec=codec, target=target, dtype=dtype, store=store)
    run_state_machine_as_test(machine, settings=settings(max_examples=7, stateful_step_count=30))


# Faults that the machine must find


def off_by_one(monkeypatch):
    right = ReferenceKVCache.read_target

    def shifted(kv, layer, pages):
        return right(kv, layer, pages.roll(1))

    monkeypatch.setattr(ReferenceKVCache, "read_target", shifted)


def records_of_the_previous_generation(monkeypatch):
    right = ResidualCache.write

    def only_the_first(tiers, layer, pages, records):
        first = [tiers.table.ref(page).generation == 0 for page in pages.tolist()]
        right(tiers, layer, pages[first], records[first])

    monkeypatch.setattr(ResidualCache, "write", only_the_first)


def fetches_finish_whatever_the_generation(monkeypatch):
    monkeypatch.setattr(ResidualTable, "is_current", lambda table, ref: True)


def fetches_bring_the_wrong_page(monkeypatch):
    right = ResidualCache._copy_to_cache

    def neighbour(tiers, page):
        # The cache slot is that of `page`, the record that of the page before it.
        read = tiers.store.read
        with monkeypatch.context() as patch:
            patch.setattr(tiers.store, "read", lambda layer, pages: read(layer, pages - 1))
            right(tiers, page)

    monkeypatch.setattr(ResidualCache, "_copy_to_cache", neighbour)


def decoded_anchors_are_never_forgotten(monkeypatch):
    monkeypatch.setattr(DecodedAnchors, "forget", lambda anchors, page: None)


def anchors_have_the_place_of_another_page(monkeypatch):
    right = AnchorPlaces.of
    monkeypatch.setattr(AnchorPlaces, "of", lambda places, pages: right(places, pages.roll(1)))


def freed_pages_keep_their_slots(monkeypatch):
    monkeypatch.setattr(ResidualCache, "release", lambda tiers, page: tiers.table.release(page))


@pytest.mark.parametrize(
    "fault",
    [
        off_by_one,
        records_of_the_previous_generation,
        fetches_finish_whatever_the_generation,
        fetches_bring_the_wrong_page,
        decoded_anchors_are_never_forgotten,
        anchors_have_the_place_of_another_page,
        freed_pages_keep_their_slots,
    ],
)
def test_a_fault_is_found(reference_kv_machine, monkeypatch, fault):
    fault(monkeypatch)
    # Up to more cases than above, but without shrinking: a found fault is enough.
    limits = settings(
        max_examples=40, stateful_step_count=30, phases=[Phase.generate], print_blob=False
    )
    options = {"anchor_pages": 5} if fault is anchors_have_the_place_of_another_page else {}
    with pytest.raises((AssertionError, PageStateError)):
        run_state_machine_as_test(reference_kv_machine(**options), settings=limits)
