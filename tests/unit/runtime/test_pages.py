"""PageKeeper: the pages of a request that are in full precision as it grows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.runtime.pages import PageKeeper

PAGE = 32
PAGES = [7, 2, 9, 4, 11, 1, 8, 3]


def grow(kv, keeper, before, after, drafts=0):
    """Write positions before .. after + drafts - 1 and commit those below `after`."""
    end = after + drafts
    wanted = PAGES[before // PAGE : -(-end // PAGE)]
    kv.open_pages(wanted)
    g = kv.geometry
    for page in wanted:
        kv_page = torch.full((PAGE, g.num_kv_heads, g.head_dim), float(page))
        kv.window.write(0, torch.full((PAGE,), page), torch.arange(PAGE), kv_page, -kv_page)
    keeper.commit(torch.tensor(PAGES[: -(-end // PAGE)]), before, after)
    keeper.flush()
    kv.check_integrity()


@settings(max_examples=40)
@given(
    steps=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 40)), max_size=12),
    recent_pages=st.integers(1, 3),
)
def test_keeps_exactly_the_newest_full_pages_and_what_is_being_filled(make_kv, steps, recent_pages):
    kv = make_kv(window_pages=8)
    keeper = PageKeeper(kv, recent_pages)
    length = 0
    for growth, drafts in steps:
        after = min(length + growth, 6 * PAGE)
        if after == length:
            break
        grow(kv, keeper, length, after, drafts)
        num_full = after // PAGE
        num_opened = -(-(after + drafts) // PAGE)
        recent = PAGES[max(0, num_full - recent_pages) : num_full]
        encoded = PAGES[: max(0, num_full - recent_pages)]
        filling = set(kv.window.slots) - set(recent)
        assert set(recent) <= set(kv.window.slots)
        assert kv.window.committed_pages() == recent
        assert set(PAGES[num_full:num_opened]) <= filling
        assert filling.isdisjoint(PAGES[:num_full])
        assert [p for p in range(13) if kv.is_encoded(p)] == sorted(encoded)
        length = after


def test_drafts_beyond_the_committed_length_commit_nothing(make_kv):
    kv = make_kv()
    grow(kv, PageKeeper(kv, 1), 0, PAGE - 1, drafts=10)
    assert kv.window.committed_pages() == []
    assert list(kv.window.slots) == PAGES[:2]


def test_retiring_encodes_full_pages_and_leaves_the_partial_one(make_kv):
    kv = make_kv()
    keeper = PageKeeper(kv, 2)
    grow(kv, keeper, 0, 3 * PAGE + 5)
    assert len(kv.window.slots) == 3
    keeper.retire(torch.tensor(PAGES[:4]))
    assert list(kv.window.slots) == [PAGES[3]]
    assert all(kv.is_encoded(p) for p in PAGES[:3])
    keeper.retire(torch.tensor(PAGES[:4]))
    kv.check_integrity()


def test_a_page_that_had_to_make_room_is_passed_over(make_kv):
    kv = make_kv(window_pages=3)
    keeper = PageKeeper(kv, 2)
    grow(kv, keeper, 0, 2 * PAGE)
    kv.open_pages([5, 6])
    assert kv.is_encoded(PAGES[0])
    kv.free_pages([5, 6])
    grow(kv, keeper, 2 * PAGE, 3 * PAGE + 1)
    assert list(kv.window.slots) == [PAGES[1], PAGES[2], PAGES[3]]
    assert [p for p in PAGES if kv.is_encoded(p)] == [PAGES[0]]


def test_a_cached_prefix_stays_encoded(make_kv):
    kv = make_kv()
    keeper = PageKeeper(kv, 1)
    grow(kv, keeper, 0, 2 * PAGE)
    keeper.retire(torch.tensor(PAGES[:2]))
    grow(kv, keeper, 2 * PAGE, 3 * PAGE)
    assert list(kv.window.slots) == [PAGES[2]]
    grow(kv, keeper, 3 * PAGE, 4 * PAGE)
    assert list(kv.window.slots) == [PAGES[3]]


@pytest.mark.parametrize("recent_pages", [1, 2])
def test_one_long_step_encodes_all_but_the_newest(make_kv, recent_pages):
    kv = make_kv()
    grow(kv, PageKeeper(kv, recent_pages), 0, 5 * PAGE)
    assert list(kv.window.slots) == PAGES[5 - recent_pages : 5]
