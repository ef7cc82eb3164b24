"""Generated situations for the step planner."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from sglang_kvspec.planning.step import RequestView, StepBudget


class Situation(NamedTuple):
    requests: list[RequestView]
    budget: StepBudget


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Requests over a common set of pages, some shared as a prefix, some cached by nobody.

    Every page is in one state for all who use it, and the cache holds at least what is in it.
    """
    num_pages = draw(st.integers(1, 24))
    state = draw(st.lists(st.sampled_from("MRA"), min_size=num_pages, max_size=num_pages))
    requests = []
    used: set[int] = set()
    for index in range(draw(st.integers(0, 6))):
        pages = draw(st.lists(st.integers(0, num_pages - 1), unique=True, max_size=num_pages))
        used.update(pages)
        cap_len = draw(st.integers(0, 20))
        requests.append(
            RequestView(
                index=index,
                num_drafts=draw(st.integers(0, cap_len)),
                due_len=draw(st.integers(0, 20)),
                cap_len=cap_len,
                waited=draw(st.sampled_from([0, 1, 7, 8, 9])),
                missing=tuple(p for p in pages if state[p] == "M"),
                resident=tuple(p for p in pages if state[p] == "R"),
                num_arriving=sum(state[p] == "A" for p in pages),
            )
        )
    idle = tuple(p for p in range(num_pages) if state[p] == "R" and p not in used)
    in_cache = sum(s in "RA" for s in state)
    free = draw(st.integers(0, 8))
    budget = StepBudget(
        fetch_pages=draw(st.integers(1, 8)),
        free_cache_pages=free,
        cache_pages=in_cache + free,
        idle_resident=idle,
    )
    return Situation(requests, budget)


@pytest.fixture(scope="session")
def situation_strategy() -> st.SearchStrategy[Situation]:
    return situations()
