"""Free slots of a slab, compared with a set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.kv.prefix_store.free_slots import FreeSlots, neighbour_runs

steps = st.tuples(st.sampled_from(["near", "take", "give"]), st.integers(-1, 9))


@given(num_slots=st.integers(0, 8), steps=st.lists(steps, max_size=60))
def test_behaves_like_a_set_of_numbers(num_slots, steps):
    slots = FreeSlots(num_slots)
    free = set(range(num_slots))
    for action, slot in steps:
        if action == "near":
            neighbour = None if slot < 0 else slot
            after = slot + 1
            expected = after if slot >= 0 and after in free else min(free, default=None)
            assert slots.take_near(neighbour) == expected
            free.discard(expected)
        elif action == "take" and slot in free:
            slots.take(slot)
            free.remove(slot)
        elif action == "take":
            with pytest.raises(AssertionError, match="is not free"):
                slots.take(slot)
        elif 0 <= slot < num_slots and slot not in free:
            slots.give_back(slot)
            free.add(slot)
        assert len(slots) == len(free)
        assert [slot in slots for slot in range(-1, 10)] == [s in free for s in range(-1, 10)]


def test_a_slot_cannot_be_freed_twice():
    slots = FreeSlots(3)
    with pytest.raises(AssertionError, match="slot 1 was freed twice"):
        slots.give_back(1)


def test_reuse_does_not_grow_without_bound():
    slots = FreeSlots(4)
    for slot in range(4):
        slots.take(slot)
    for _ in range(5000):
        slots.give_back(2)
        assert slots.take_near(1) == 2
    assert len(slots._lowest) <= 64


@given(slots=st.lists(st.integers(0, 12), max_size=20), most=st.integers(1, 4))
def test_runs_cover_every_position_once_with_neighbours_only(slots, most):
    runs = list(neighbour_runs(slots, most))
    assert sorted(p for run in runs for p in run) == list(range(len(slots)))
    for run in runs:
        assert len(run) <= most
        assert [slots[p] for p in run] == list(range(slots[run[0]], slots[run[0]] + len(run)))


def test_runs_are_as_long_as_they_can_be():
    assert list(neighbour_runs([7, 5, 6, 1, 9, 8], 10)) == [[3], [1, 2, 0, 5, 4]]
    assert list(neighbour_runs([3, 2, 1, 0], 3)) == [[3, 2, 1], [0]]
