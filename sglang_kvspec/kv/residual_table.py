"""State and generation of every page's residual. Only this module changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import NamedTuple

from sglang_kvspec.core.errors import PageStateError


class ResidualState(IntEnum):
    """State of a page's residual.

    ABSENT: no residual, the page is free, partial or in the recent window. IN_FLIGHT: being
    encoded, or on the network. STORED: in the store only. FETCHING: being copied from the
    store into the cache. RESIDENT: in the residual cache (and in the store, where there is one)."""

    ABSENT = 0
    IN_FLIGHT = 1
    STORED = 2
    FETCHING = 3
    RESIDENT = 4


_ALLOWED: dict[ResidualState, frozenset[ResidualState]] = {
    ResidualState.ABSENT: frozenset({ResidualState.IN_FLIGHT}),
    ResidualState.IN_FLIGHT: frozenset({ResidualState.STORED, ResidualState.RESIDENT}),
    ResidualState.STORED: frozenset({ResidualState.FETCHING}),
    ResidualState.FETCHING: frozenset({ResidualState.RESIDENT, ResidualState.STORED}),
    ResidualState.RESIDENT: frozenset({ResidualState.STORED}),
}


# States from which each state may be reached.
_FROM = {
    new: frozenset(old for old, allowed in _ALLOWED.items() if new in allowed)
    for new in ResidualState
}


class PageRef(NamedTuple):
    """One use of a page id. SGLang reuses page ids; generations tell the uses apart."""

    page: int
    generation: int


class ResidualTable:
    """State and generation of every page; page ids run from 0 to num_pages inclusive."""

    def __init__(self, num_pages: int) -> None:
        self._states = [ResidualState.ABSENT] * (num_pages + 1)
        self._generations = [0] * (num_pages + 1)
        self._counts: Counter[ResidualState] = Counter({ResidualState.ABSENT: num_pages + 1})

    def state(self, page: int) -> ResidualState:
        return self._states[page]

    def ref(self, page: int) -> PageRef:
        return PageRef(page, self._generations[page])

    def is_current(self, ref: PageRef) -> bool:
        return self._generations[ref.page] == ref.generation

    def advance(self, page: int, new: ResidualState) -> None:
        """Move a page to `new`. Raises PageStateError on a transition that is not allowed."""
        self._check(page, new)
        self._set(page, new)

    def advance_all(self, pages: Collection[int], new: ResidualState) -> None:
        """Move distinct pages to `new`. Raises PageStateError, and moves none, if any may not."""
        states, sources = self._states, _FROM[new]
        olds = [states[page] for page in pages]
        if not sources.issuperset(olds):
            for page in pages:
                self._check(page, new)
        for old, count in Counter(olds).items():
            self._counts[old] -= count
            self._counts[new] += count
        for page in pages:
            states[page] = new

    def release(self, page: int) -> ResidualState:
        """Start the next generation of a freed page as ABSENT. Return the state it had."""
        old = self._states[page]
        self._set(page, ResidualState.ABSENT)
        self._generations[page] += 1
        return old

    def pages_in(self, pages: Iterable[int], state: ResidualState) -> list[int]:
        return [page for page in pages if self._states[page] is state]

    def split(
        self, pages: Iterable[int], state: ResidualState, others: Collection[ResidualState]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the pages in `state`, and the pages in one of `others`."""
        states = self._states
        known = [(page, states[page]) for page in pages]
        return (
            tuple([page for page, found in known if found is state]),
            tuple([page for page, found in known if found in others]),
        )

    def num_in(self, state: ResidualState) -> int:
        return self._counts[state]

    def counts(self) -> dict[str, int]:
        """Number of pages by state name, the padding page included."""
        return {state.name: self._counts[state] for state in ResidualState}

    def _check(self, page: int, new: ResidualState) -> None:
        old = self._states[page]
        if new not in _ALLOWED[old]:
            raise PageStateError(
                f"page {page}: {old.name} -> {new.name} is not allowed "
                f"(allowed: {', '.join(state.name for state in sorted(_ALLOWED[old]))})"
            )

    def _set(self, page: int, new: ResidualState) -> None:
        self._counts[self._states[page]] -= 1
        self._counts[new] += 1
        self._states[page] = new
