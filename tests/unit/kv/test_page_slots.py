"""Slots handed to pages, compared with a dict."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv.page_slots import OwnSlots, PageSlots

CPU = torch.device("cpu")


@given(
    num_slots=st.integers(0, 5),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40),
)
def test_behaves_like_an_ordered_dict_of_bounded_size(num_slots, steps):
    slots = PageSlots(8, num_slots, CPU)
    model: dict[int, int] = {}
    for acquire, page in steps:
        if not acquire:
            assert slots.release(page) == (model.pop(page, None) is not None)
        elif page in model:
            with pytest.raises(AssertionError, match="already has a slot"):
                slots.acquire(page)
        elif len(model) == num_slots:
            with pytest.raises(CapacityError, match=f"all {num_slots} are taken"):
                slots.acquire(page)
        else:
            model[page] = slots.acquire(page)
        slots.check_integrity()
        assert list(slots) == list(model)
        assert len(slots) == len(model)
        assert slots.num_free == num_slots - len(model)
        assert all((page in slots) == (page in model) for page in range(9))
        assert slots.table.tolist() == [model.get(page, -1) for page in range(9)]


@pytest.mark.parametrize("make", [PageSlots, lambda n, _, device: OwnSlots(n, device)])
@given(groups=st.lists(st.tuples(st.booleans(), st.sets(st.integers(1, 8))), max_size=20))
def test_many_at_once_are_as_many_one_by_one(make, groups):
    slots = make(8, 5, CPU)
    held: set[int] = set()
    for acquire, group in groups:
        pages = sorted(group)
        if not acquire:
            slots.release_all(pages)
            held -= group
        elif group & held:
            continue
        elif len(pages) > slots.num_free:
            with pytest.raises(CapacityError, match="are taken"):
                slots.acquire_all(pages)
        else:
            given_out = slots.acquire_all(pages)
            assert given_out == sorted(given_out) == [slots.slot_of(page) for page in pages]
            held |= group
        slots.check_integrity()
        assert set(slots) == held


def test_a_page_that_has_a_slot_gets_no_other():
    slots = PageSlots(8, 5, CPU)
    slots.acquire(3)
    with pytest.raises(AssertionError, match="already has a slot"):
        slots.acquire_all([2, 3])
    with pytest.raises(AssertionError, match="given twice"):
        slots.acquire_all([2, 2])
    slots.check_integrity()


def test_slots_are_distinct_and_in_range():
    slots = PageSlots(10, 4, CPU)
    assert sorted(slots.acquire(page) for page in (0, 10, 3, 7)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.table.__setitem__(3, -1),
        lambda s: s.table.__setitem__(5, 1),
        lambda s: s._free.append(0),
        lambda s: s._free.pop(),
        lambda s: s._slot_of_page.__setitem__(5, 0),
    ],
    ids=["forgotten", "invented", "freed twice", "leaked", "shared"],
)
def test_integrity_check_sees_damage(damage):
    slots = PageSlots(8, 4, CPU)
    slots.acquire(3)
    slots.check_integrity()
    damage(slots)
    with pytest.raises(AssertionError):
        slots.check_integrity()


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=40))
def test_own_slots_behave_like_an_ordered_set_with_room_for_all(steps):
    slots = OwnSlots(6, CPU)
    model: dict[int, None] = {}
    for acquire, page in steps:
        if not acquire:
            assert slots.release(page) == (page in model)
            model.pop(page, None)
        elif page in model:
            with pytest.raises(AssertionError, match="already has a slot"):
                slots.acquire(page)
        else:
            assert slots.acquire(page) == page - 1 == slots.slot_of(page)
            model[page] = None
        slots.check_integrity()
        assert list(slots) == list(model)
        assert len(slots) == len(model)
        assert slots.num_free == 6 - len(model)
        assert all((page in slots) == (page in model) for page in range(8))
        # The table never changes, so kernels need no look-up.
        assert slots.table.tolist() == [-1, 0, 1, 2, 3, 4, 5]


def test_own_slots_of_no_pages():
    slots = OwnSlots(0, CPU)
    assert slots.num_free == len(slots) == 0
    assert slots.table.tolist() == [-1]


@pytest.mark.parametrize("page", [-1, 0, 7])
def test_padding_and_unknown_pages_have_no_own_slot(page):
    slots = OwnSlots(6, CPU)
    with pytest.raises(AssertionError, match=f"no slot for page {page}"):
        slots.acquire(page)
    assert not slots.release(page)
    assert len(slots) == 0


@pytest.mark.parametrize("page", [0, 3, 9])
def test_own_slots_see_damage(page):
    slots = OwnSlots(6, CPU)
    slots.acquire(3)
    slots._slot_of_page[page] = 5
    with pytest.raises(AssertionError):
        slots.check_integrity()
