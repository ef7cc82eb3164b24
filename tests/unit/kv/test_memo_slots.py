"""MemoSlots against a plain list of keys, newest last."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.kv.memo_slots import MemoSlots

NUM_KEYS = 8
reads = st.lists(st.integers(0, NUM_KEYS - 1), unique=True, max_size=5)
steps = st.lists(st.one_of(reads, st.integers(0, NUM_KEYS - 1)), max_size=30)


@given(num_slots=st.integers(0, 5), steps=steps)
def test_the_keys_read_most_recently_keep_their_slots(num_slots, steps):
    """A list is a read of its keys, a number is a key that is forgotten."""
    slots, newest = MemoSlots(NUM_KEYS, num_slots), []
    held = {}
    for step in steps:
        if isinstance(step, int):
            slots.forget(step)
            newest = [key for key in newest if key != step]
            held.pop(step, None)
            continue
        placed = slots.place(torch.tensor(step, dtype=torch.int64))
        if len(step) > num_slots:
            assert placed is None
            continue
        found, changed = (part.tolist() for part in placed)
        assert len(set(found)) == len(step)
        given_before = {key: held[key] for key in step if key in held}
        assert set(changed) == set(found) - set(given_before.values())
        now = dict(zip(step, found, strict=True))
        assert given_before.items() <= now.items()
        # Keys of one read are of one age: of older reads, the newest ones stay.
        others = [key for key in newest if key not in step]
        stay = {key for key, slot in held.items() if slot not in found and key not in step}
        assert len(stay) == min(len(others), num_slots - len(step))
        held = {key: slot for key, slot in held.items() if key in stay} | now
        newest = [key for key in others if key in stay] + step


def test_the_oldest_read_gives_way():
    slots = MemoSlots(NUM_KEYS, 2)
    first, second = (int(slots.place(torch.tensor([key]))[0]) for key in (3, 4))
    slots.place(torch.tensor([3]))
    assert slots.place(torch.tensor([5]))[0].tolist() == [second]
    assert slots.place(torch.tensor([6]))[0].tolist() == [first]


def test_there_are_no_more_slots_than_keys():
    assert MemoSlots(3, 100).num_slots == 3
