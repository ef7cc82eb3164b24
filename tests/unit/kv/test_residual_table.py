"""States and generations of residual pages, compared with a model that knows the allowed moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_kvspec.core.errors import PageStateError
from sglang_kvspec.kv.residual_table import PageRef, ResidualState, ResidualTable

NUM_PAGES = 4
# Written out here: an import of the table under test would share its mistakes.
MOVES = {
    "ABSENT": {"IN_FLIGHT"},
    "IN_FLIGHT": {"STORED", "RESIDENT"},
    "STORED": {"FETCHING"},
    "FETCHING": {"RESIDENT", "STORED"},
    "RESIDENT": {"STORED"},
}
pages = st.integers(0, NUM_PAGES)


class TableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = ResidualTable(NUM_PAGES)
        self.states = ["ABSENT"] * (NUM_PAGES + 1)
        self.generations = [0] * (NUM_PAGES + 1)
        self.refs: list[PageRef] = []

    @rule(page=pages, new=st.sampled_from(ResidualState))
    def advance(self, page, new):
        old = self.states[page]
        if new.name in MOVES[old]:
            self.table.advance(page, new)
            self.states[page] = new.name
        else:
            with pytest.raises(PageStateError, match=f"page {page}: {old} -> {new.name}"):
                self.table.advance(page, new)

    @rule(several=st.sets(pages), new=st.sampled_from(ResidualState))
    def advance_all(self, several, new):
        if all(new.name in MOVES[self.states[page]] for page in several):
            self.table.advance_all(several, new)
            for page in several:
                self.states[page] = new.name
        else:
            with pytest.raises(PageStateError, match="is not allowed"):
                self.table.advance_all(several, new)

    @rule(page=pages)
    def release(self, page):
        assert self.table.release(page).name == self.states[page]
        self.states[page] = "ABSENT"
        self.generations[page] += 1

    @rule(
        chosen=st.lists(pages),
        state=st.sampled_from(ResidualState),
        others=st.sets(st.sampled_from(ResidualState)),
    )
    def split(self, chosen, state, others):
        names = {other.name for other in others}
        assert self.table.split(chosen, state, others) == (
            tuple(page for page in chosen if self.states[page] == state.name),
            tuple(page for page in chosen if self.states[page] in names),
        )

    @rule(page=pages)
    def remember(self, page):
        self.refs.append(self.table.ref(page))

    @invariant()
    def states_agree(self):
        assert [self.table.state(p).name for p in range(NUM_PAGES + 1)] == self.states
        assert self.table.counts() == {
            state.name: Counter(self.states)[state.name] for state in ResidualState
        }
        for state in ResidualState:
            wanted = [p for p in (3, 0, 4, 1, 2) if self.states[p] == state.name]
            assert self.table.pages_in((3, 0, 4, 1, 2), state) == wanted

    @invariant()
    def references_expire_with_their_generation(self):
        for ref in self.refs:
            current = self.generations[ref.page] == ref.generation
            assert self.table.is_current(ref) == current


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.parametrize("old", MOVES)
@pytest.mark.parametrize("new", list(ResidualState))
def test_every_move(old, new):
    paths = {
        "ABSENT": [],
        "IN_FLIGHT": ["IN_FLIGHT"],
        "STORED": ["IN_FLIGHT", "STORED"],
        "FETCHING": ["IN_FLIGHT", "STORED", "FETCHING"],
        "RESIDENT": ["IN_FLIGHT", "RESIDENT"],
    }
    table = ResidualTable(1)
    for name in paths[old]:
        table.advance(1, ResidualState[name])
    if new.name in MOVES[old]:
        table.advance(1, new)
        assert table.state(1) is new
    else:
        with pytest.raises(PageStateError) as caught:
            table.advance(1, new)
        assert table.state(1).name == old
        assert all(name in str(caught.value) for name in MOVES[old])


def test_the_padding_page_and_the_last_page_are_counted():
    assert ResidualTable(7).counts()["ABSENT"] == 8
    ResidualTable(7).advance(7, ResidualState.IN_FLIGHT)
