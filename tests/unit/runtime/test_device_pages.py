"""PageKeeper on a GPU cache: full pages are published together, and the newest stay in the
window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.runtime.draft_rows import draft_row, drafts_fit
from sglang_kvspec.runtime.pages import PageKeeper

SIZE = 32
PAGES = [7, 2, 9, 4, 11, 1, 8, 3]
OTHER = [10, 12, 6]


def grow(kv, keeper, before, after, drafts=0, pages=PAGES):
    """Open the pages of positions before .. after + drafts - 1 and commit those below `after`."""
    end = after + drafts
    kv.open_pages(pages[before // SIZE : -(-end // SIZE)])
    keeper.commit(torch.tensor(pages[: -(-end // SIZE)]), before, after)


def encoded(kv):
    return {page for page in range(kv.plan.num_pages + 1) if kv.is_encoded(page)}


@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=12),
    recent_pages=st.integers(1, 3),
)
def test_full_pages_are_encoded_once_and_the_newest_stay(make_device_kv, steps, recent_pages):
    kv = make_device_kv(window_pages=8, num_layers=2)
    keeper = PageKeeper(kv, recent_pages)
    length = 0
    for growth, drafts in steps:
        after = min(length + growth, 6 * SIZE)
        grow(kv, keeper, length, after, drafts)
        keeper.flush()
        kv.check_integrity()
        num_full, num_opened = after // SIZE, -(-(after + drafts) // SIZE)
        assert encoded(kv) == set(PAGES[:num_full])
        assert kv.window.committed_pages() == PAGES[max(0, num_full - recent_pages) : num_full]
        filling = set(kv.window.slots) - set(PAGES[:num_full])
        assert set(PAGES[num_full:num_opened]) <= filling
        length = after
    done = [page for layer, _, pages in kv.encodings if layer == 0 for page in pages]
    assert sorted(done) == sorted(PAGES[: length // SIZE])
    assert [e[1:] for e in kv.encodings[0::2]] == [e[1:] for e in kv.encodings[1::2]]


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, SIZE)), max_size=9
    ),
    recent_pages=st.integers(1, 2),
    spare=st.integers(0, 2),
)
def test_drafts_may_begin_before_the_flush(make_device_kv, steps, recent_pages, spare):
    """Two requests share a window that holds the pages of both, with a few to spare. Draft rows
    read window pages and encoded pages, and the flush finds the pages that it must encode."""
    pages = [PAGES, [15, 21, 19, 14, 20, 17, 16, 18]]
    kv = make_device_kv(window_pages=2 * (recent_pages + 2) + spare, num_pages=21, num_layers=1)
    keeper = PageKeeper(kv, recent_pages)
    lengths = [0, 0]
    for *growths, num_drafts in steps:
        ends = [min(sum(pair), 6 * SIZE) for pair in zip(lengths, growths, strict=True)]
        for own, before, after in zip(pages, lengths, ends, strict=True):
            grow(kv, keeper, before, after, pages=own)
        lengths = ends
        if not drafts_fit(kv, [(length, num_drafts) for length in lengths]):
            keeper.flush()
        before = set(kv.window.slots)
        rows = [
            draft_row(kv, 1, length, torch.tensor(own), num_drafts)
            for length, own in zip(lengths, pages, strict=True)
        ]
        assert before <= set(kv.window.slots)
        for row, own, length in zip(rows, pages, lengths, strict=True):
            assert encoded(kv).issuperset(row.past.tolist())
            assert row.tail_len == length - len(row.past) * SIZE
            behind = own[len(row.past) : (length + num_drafts) // SIZE + 1]
            assert row.tail == [kv.window.slots.slot_of(page) for page in behind]
        keeper.flush()
        kv.check_integrity()
        full = {page for n, own in zip(lengths, pages, strict=True) for page in own[: n // SIZE]}
        assert encoded(kv) == full


def test_nothing_happens_before_the_flush_and_then_at_once(make_device_kv):
    kv = make_device_kv(num_layers=2)
    keeper = PageKeeper(kv, 1)
    grow(kv, keeper, 0, 2 * SIZE)
    grow(kv, keeper, 0, SIZE + 3, pages=OTHER)
    assert kv.encodings == []
    assert kv.window.committed_pages() == []
    slots = [kv.window.slots.slot_of(page) for page in (7, 2, 10)]
    keeper.flush()
    assert kv.encodings == [(0, slots, [7, 2, 10]), (1, slots, [7, 2, 10])]
    assert list(kv.window.slots) == [2, 10, 12]
    keeper.flush()
    assert len(kv.encodings) == 2


def test_a_flush_may_follow_several_commits_of_one_request(make_device_kv):
    kv = make_device_kv()
    keeper = PageKeeper(kv, 1)
    grow(kv, keeper, 0, SIZE + 1)
    grow(kv, keeper, SIZE + 1, 2 * SIZE)
    grow(kv, keeper, 2 * SIZE, 3 * SIZE + 9)
    keeper.flush()
    assert encoded(kv) == set(PAGES[:3])
    assert list(kv.window.slots) == PAGES[2:4]
    kv.check_integrity()


def test_pages_that_a_prefill_encoded_directly_are_passed_over(make_device_kv):
    kv = make_device_kv()
    keeper = PageKeeper(kv, 1)
    kv.begin_encode(PAGES[:3])
    kv.finish_encode(PAGES[:3])
    kv.open_pages(PAGES[3:5])
    keeper.commit(torch.tensor(PAGES[:5]), 0, 4 * SIZE + 1)
    keeper.flush()
    assert [pages for _, _, pages in kv.encodings] == [[PAGES[3]]]
    assert list(kv.window.slots) == PAGES[3:5]


def test_a_published_page_that_had_to_make_room_is_passed_over(make_device_kv):
    kv = make_device_kv(window_pages=3)
    keeper = PageKeeper(kv, 2)
    grow(kv, keeper, 0, 2 * SIZE)
    keeper.flush()
    kv.open_pages([5, 6])
    assert PAGES[0] not in kv.window.slots
    kv.free_pages([5, 6])
    grow(kv, keeper, 2 * SIZE, 3 * SIZE + 1)
    keeper.flush()
    assert list(kv.window.slots) == PAGES[1:4]
    assert encoded(kv) == set(PAGES[:3])
    kv.check_integrity()


def test_a_reused_page_keeps_no_state_of_its_former_request(make_device_kv):
    kv = make_device_kv()
    keeper = PageKeeper(kv, 1)
    grow(kv, keeper, 0, 2 * SIZE)
    keeper.flush()
    kv.free_pages(PAGES[:2])
    grow(kv, keeper, 0, SIZE + 1)
    keeper.flush()
    assert list(kv.window.slots) == PAGES[:2]
    assert encoded(kv) == {PAGES[0]}


@pytest.mark.parametrize("recent_pages", [1, 2])
def test_room_made_between_commit_and_flush(make_device_kv, recent_pages):
    """Pages that the flush would move out of the window may have left it before."""
    kv = make_device_kv(window_pages=4)
    keeper = PageKeeper(kv, recent_pages)
    grow(kv, keeper, 0, 2 * SIZE)
    keeper.flush()
    grow(kv, keeper, 2 * SIZE, 3 * SIZE)
    kv.open_pages([5, 6])
    keeper.flush()
    kv.check_integrity()
    assert encoded(kv) == set(PAGES[:3])
    assert PAGES[2] in kv.window.slots


def test_drafts_publish_nothing(make_device_kv):
    kv = make_device_kv()
    keeper = PageKeeper(kv, 1)
    grow(kv, keeper, 0, SIZE - 1, drafts=2 * SIZE)
    keeper.flush()
    assert kv.encodings == []
    assert list(kv.window.slots) == PAGES[:3]


def test_retiring_frees_published_pages_and_leaves_the_partial_one(make_device_kv):
    kv = make_device_kv()
    keeper = PageKeeper(kv, 2)
    grow(kv, keeper, 0, 3 * SIZE + 5)
    keeper.flush()
    assert len(kv.window.slots) == 3
    keeper.retire(torch.tensor(PAGES[:4]))
    assert list(kv.window.slots) == [PAGES[3]]
    assert encoded(kv) == set(PAGES[:3])
    keeper.retire(torch.tensor(PAGES[:4]))
    assert len(kv.encodings) == 1
    kv.check_integrity()
