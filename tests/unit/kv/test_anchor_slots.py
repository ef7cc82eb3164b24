"""Slots of kept anchors against a plain model: never more pages than slots, and never the anchors
of another page."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sglang_kvspec.kv.anchor_slots import AnchorSlots
from sglang_kvspec.kv.prefix_store import StoredPage, chain_links

SIZE = 2
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
stamps = st.integers(0, 1)


def links_of(*pages):
    return list(chain_links([page for page in pages for _ in range(SIZE)], SIZE))


PARENTS = {
    link.key: link.parent for pages in product(range(3), repeat=4) for link in links_of(*pages)
}


class AnchorSlotsMachine(RuleBasedStateMachine):
    """Random use of AnchorSlots. `memory`: (key, stamp) in each slot, since claimed slots are
    written at once."""

    NUM_SLOTS = 4

    def __init__(self):
        super().__init__()
        self.slots = AnchorSlots(self.NUM_SLOTS)
        self.memory = {}
        self.used = {}
        self.now = 0

    def tick(self, keys):
        self.now += 1
        self.used |= dict.fromkeys(keys, self.now)

    @rule(prompt=prompts, stamp=stamps, first=st.integers(0, 3))
    def keep(self, prompt, stamp, first):
        """Keep anchors of the end of a prefix that leaves the KV cache."""
        for link in links_of(*prompt)[first:]:
            had = self.held(link)
            others = {page: self.used[page.key] for page in self.all_held() if page.key != link.key}
            slot = self.slots.claim(link, stamp)
            self.tick([link.key])
            if had == stamp:
                assert slot is None
            if slot is None:
                continue
            assert 0 <= slot < self.NUM_SLOTS
            self.memory[slot] = (link.key, stamp)
            lost = [page for page in others if self.slots.slot_of(page) is None]
            assert len(lost) <= (had is None and len(others) == self.NUM_SLOTS)
            for page in lost:
                self.check_was_oldest_leaf(page, others, link)

    def check_was_oldest_leaf(self, lost, others, link):
        parents = {PARENTS[page.key] for page in others}
        leaves = {page: used for page, used in others.items() if page.key not in parents}
        leaves = {page: used for page, used in leaves.items() if page.key != link.parent}
        assert lost in leaves, "a page makes room while one behind it stays"
        assert others[lost] == min(leaves.values()), "one used longer ago stays"

    @rule(prompt=prompts)
    def look_up(self, prompt):
        links = links_of(*prompt)
        self.slots.touch(links)
        self.tick([link.key for link in links if self.held(link) is not None])

    @rule(prompt=prompts)
    def come_back(self, prompt):
        links = links_of(*prompt)
        self.slots.release(links)
        assert all(self.held(link) is None for link in links)

    def held(self, link):
        found = [s for s in (0, 1) if self.slots.slot_of(StoredPage(link.key, s)) is not None]
        assert len(found) <= 1
        return found[0] if found else None

    def all_held(self):
        pages = [StoredPage(key, stamp) for key in PARENTS for stamp in (0, 1)]
        return [page for page in pages if self.slots.slot_of(page) is not None]

    @invariant()
    def a_slot_holds_what_is_found_there(self):
        held = self.all_held()
        assert len(held) == len(self.slots) <= self.NUM_SLOTS
        for page in held:
            assert self.memory[self.slots.slot_of(page)] == tuple(page), "anchors of another page"

    @invariant()
    def books_agree(self):
        self.slots.check_integrity()
        counters = self.slots.counters
        assert counters.kept == counters.reused + counters.dropped + len(self.slots)


LIMITS = {"stateful_step_count": 40, "max_examples": 60}


def test_slots_under_random_use():
    run_state_machine_as_test(AnchorSlotsMachine, settings=settings(**LIMITS))


def takes_any_version(monkeypatch):
    right = AnchorSlots.slot_of

    def slot_of(slots, page):
        found = [right(slots, StoredPage(page.key, stamp)) for stamp in (0, 1)]
        return next((slot for slot in found if slot is not None), None)

    monkeypatch.setattr(AnchorSlots, "slot_of", slot_of)


def never_makes_room_for_another_version(monkeypatch):
    monkeypatch.setattr(AnchorSlots, "_forget", lambda slots, key: 0)


@pytest.mark.parametrize("fault", [takes_any_version, never_makes_room_for_another_version])
def test_the_machine_finds(monkeypatch, fault):
    fault(monkeypatch)
    limits = settings(**LIMITS, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(AnchorSlotsMachine, settings=limits)


def test_without_room_for_a_page_its_beginning_stays():
    """A page cannot be used without those before it."""
    slots = AnchorSlots(2)
    first, second, third = links_of(0, 1, 2)
    # Leaves are evicted first, so the tree gives the pages in this order.
    assert [slots.claim(link, 7) is not None for link in (third, second, first)] == [True] * 3
    assert slots.slot_of(StoredPage(third.key, 7)) is None
    assert slots.slot_of(StoredPage(first.key, 7)) is not None
    assert AnchorSlots(0).claim(first, 7) is None
