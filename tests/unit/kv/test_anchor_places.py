"""Places of anchors where fewer pages have one than exist, compared with plain sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sglang_kvspec.kv import anchor_places
from sglang_kvspec.kv.anchor_places import AnchorPlaces

NUM_PAGES, IDLE = 9, 3
CPU = torch.device("cpu")
subsets = st.sets(st.integers(1, NUM_PAGES), min_size=1, max_size=4)


@pytest.fixture
def places() -> AnchorPlaces:
    return AnchorPlaces(NUM_PAGES, 3, CPU)


def ids(*pages: int) -> torch.Tensor:
    return torch.tensor(pages)


def test_with_a_place_for_every_page_nothing_is_looked_up():
    places = AnchorPlaces(NUM_PAGES, NUM_PAGES, CPU)
    places.begin([4, 2])
    places.free_unread([4])
    places.sync()
    some = ids(4, 2, 9)
    assert places.holds_all
    assert places.of(some) is some
    assert places.on_device(some) is some
    assert places.have(some).all()
    assert places.num_taken == 0


def test_pages_that_come_first_get_the_places(places):
    places.begin([5, 1, 9, 7])
    assert places.have(ids(5, 1, 9, 7)).tolist() == [True, True, True, False]
    assert sorted(places.of(ids(5, 1, 9)).tolist()) == [1, 2, 3]
    assert places.of(ids(7)).tolist() == [0]
    assert places.counters.without == 1
    places.check_integrity({5, 1, 9, 7})


def test_kernels_find_places_once_they_are_sent(places):
    places.begin([5, 1])
    places.sync()
    asked = torch.tensor([1, -1, 7, 5], dtype=torch.int32)
    found = places.on_device(asked)
    assert found.dtype == torch.int32
    assert found.tolist() == [*places.of(ids(1)).tolist(), -1, 0, *places.of(ids(5)).tolist()]
    # The page comes again while no place is free: what it had belongs to another.
    places.release([5])
    places.begin([2, 3, 5])
    places.sync()
    assert places.on_device(asked).tolist()[-1] == 0
    places.check_integrity({1, 2, 3, 5})


def test_pages_that_no_draft_reads_have_no_place_until_they_are_freed(places):
    places.begin([5])
    places.free_unread([5, 6])
    places.begin([6, 1])
    assert places.have(ids(5, 6, 1)).tolist() == [False, False, True]
    places.free_unread([5])
    assert places.counters.freed == 2
    assert places.counters.without == 0
    places.release([6])
    places.begin([6])
    assert places.have(ids(6)).all()
    places.check_integrity({1, 6})


def test_a_page_that_no_request_uses_gives_up_its_place(places, monkeypatch):
    monkeypatch.setattr(anchor_places, "IDLE_USES", IDLE)
    places.begin([1, 2, 3])
    for _ in range(IDLE):
        places.note_use([ids(1), ids(3)])
    places.begin([4])
    assert places.have(ids(1, 2, 3, 4)).tolist() == [True, False, True, True]
    assert places.counters.idle == 1
    # All places are in use now. Pages that stay unused become idle in their turn.
    places.begin([5])
    assert not places.have(ids(5))
    assert (places.counters.idle, places.counters.without) == (1, 1)
    for _ in range(IDLE):
        places.note_use([ids(3, 4)])
    places.begin([6])
    assert places.have(ids(1, 3, 4, 6)).tolist() == [False, True, True, True]


class PlacesMachine(RuleBasedStateMachine):
    """Random use. `held`: pages with a place, and when each was last used."""

    @initialize(num_places=st.integers(1, NUM_PAGES - 1))
    def build(self, num_places):
        self.places, self.num_places = AnchorPlaces(NUM_PAGES, num_places, CPU), num_places
        self.held: dict[int, int] = {}
        self.encoded: set[int] = set()
        self.unread: set[int] = set()
        self.now = 0

    @rule(pages=subsets)
    def begin(self, pages):
        new = sorted(pages - self.encoded)
        wanted = [page for page in new if page not in self.unread]
        self.places.begin(new)
        self.encoded |= set(new)
        idle = {page for page, last in self.held.items() if last <= self.now - IDLE}
        free = self.num_places - len(self.held)
        taken = min(max(len(wanted) - free, 0), len(idle))
        gone = self.held.keys() - self.with_places()
        assert gone <= idle
        assert len(gone) == taken
        # Those that were used first go first.
        left = (self.held[page] for page in idle - gone)
        assert max((self.held[page] for page in gone), default=0) <= min(left, default=self.now)
        self.held = {page: last for page, last in self.held.items() if page not in gone}
        self.held |= dict.fromkeys(wanted[: free + taken], self.now)

    @rule(pages=subsets)
    def use(self, pages):
        self.places.note_use([torch.tensor([page]) for page in sorted(pages)])
        self.now += 1
        self.held |= {page: self.now for page in pages & self.held.keys()}

    @rule(pages=subsets)
    def free_unread(self, pages):
        self.places.free_unread(sorted(pages))
        self.unread |= pages
        self.forget(pages)

    @rule(pages=subsets)
    def release(self, pages):
        self.places.release(pages)
        self.unread -= pages
        self.encoded -= pages
        self.forget(pages)

    @rule()
    def sync(self):
        self.places.sync()
        every = torch.arange(NUM_PAGES + 1, dtype=torch.int32)
        assert torch.equal(self.places.on_device(every), self.places.of(every.long()).int())

    @invariant()
    def places_are_those_of_the_sets(self):
        self.places.check_integrity(self.encoded)
        assert self.with_places() == self.held.keys()
        taken = self.places.of(torch.tensor(sorted(self.held), dtype=torch.int64)).tolist()
        assert len(set(taken)) == len(taken) == self.places.num_taken
        assert set(taken) <= set(range(1, self.num_places + 1))

    def forget(self, pages):
        self.held = {page: last for page, last in self.held.items() if page not in pages}

    def with_places(self):
        every = torch.arange(NUM_PAGES + 1)
        return set(every[self.places.have(every)].tolist())


def test_random_use(monkeypatch):
    monkeypatch.setattr(anchor_places, "IDLE_USES", IDLE)
    run_state_machine_as_test(PlacesMachine, settings=settings(max_examples=60))
