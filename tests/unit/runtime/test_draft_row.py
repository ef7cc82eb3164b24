"""The row of one request at the start of a round, from the pools that hold its pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.runtime.draft_rows import draft_row
from sglang_kvspec.runtime.head_lists import HeadLists

SIZE = 32
PAGES = [7, 2, 9, 4, 11, 1, 8, 3]


def pages_to(position, num_drafts):
    return torch.tensor(PAGES[: (position + num_drafts) // SIZE + 1])


def encode(kv, pages):
    """Encode pages directly, as a prefill does with pages that bypass the window."""
    kv.begin_encode(pages)
    if hasattr(kv, "encode"):
        g = kv.geometry
        data = torch.ones((len(pages), SIZE, g.num_kv_heads, g.head_dim), dtype=g.dtype)
        kv.encode(0, torch.tensor(pages), data, data)
    kv.finish_encode(pages)


@pytest.fixture(params=["tiered", "device"])
def kv(request, make_kv, make_device_kv):
    return (make_kv if request.param == "tiered" else make_device_kv)(window_pages=7)


def test_a_request_without_a_past(kv):
    row = draft_row(kv, token=5, position=0, pages=pages_to(0, 3), num_drafts=3)
    assert (row.token, row.position, row.num_drafts) == (5, 0, 3)
    assert row.past.tolist() == []
    assert row.tail == [kv.window.slots.slot_of(7)]
    assert row.tail_len == 0


@pytest.mark.parametrize(
    ("position", "num_drafts", "opened"),
    [
        (70, 1, [9]),
        # The page of the last draft is opened, too, since the verification writes to it.
        (70, 25, [9]),
        (70, 26, [9, 4]),
        (95, 1, [9, 4]),
        (64, 64, [9, 4, 11]),
        # The pending token begins a page.
        (64, 1, [9]),
    ],
)
def test_pages_that_will_be_written_are_opened(kv, position, num_drafts, opened):
    encode(kv, PAGES[:2])
    row = draft_row(kv, 1, position, pages_to(position, num_drafts), num_drafts)
    assert list(kv.window.slots) == opened
    assert row.past.tolist() == [7, 2]
    assert row.tail == [kv.window.slots.slot_of(page) for page in opened]
    assert row.tail_len == position - 64


def test_the_tail_reaches_back_over_window_pages_only(kv):
    encode(kv, [7, 9])
    kv.open_pages([2, 4, 11])
    row = draft_row(kv, 1, 4 * SIZE + 6, pages_to(4 * SIZE + 6, 2), 2)
    # Page 2 is in the window, but page 9 behind it is not.
    assert row.past.tolist() == [7, 2, 9]
    assert row.tail == [kv.window.slots.slot_of(page) for page in (4, 11)]
    assert row.tail_len == SIZE + 6


def test_a_tail_may_reach_back_to_the_first_token(kv):
    kv.open_pages(PAGES[:3])
    row = draft_row(kv, 1, 2 * SIZE + 1, pages_to(2 * SIZE + 1, 1), 1)
    assert row.past.tolist() == []
    assert row.tail == [kv.window.slots.slot_of(page) for page in PAGES[:3]]
    assert row.tail_len == 2 * SIZE + 1


def test_published_pages_are_read_in_full_precision_while_they_stay(make_device_kv):
    kv = make_device_kv()
    kv.open_pages(PAGES[:3])
    kv.commit_pages(PAGES[:2])
    row = draft_row(kv, 1, 2 * SIZE + 1, pages_to(2 * SIZE + 1, 1), 1)
    assert (row.past.tolist(), len(row.tail)) == ([], 3)
    kv.move_out_of_window(PAGES[:1])
    row = draft_row(kv, 1, 2 * SIZE + 1, pages_to(2 * SIZE + 1, 1), 1)
    assert (row.past.tolist(), len(row.tail)) == (PAGES[:1], 2)
    assert row.tail_len == SIZE + 1


@settings(max_examples=50)
@given(
    num_encoded=st.integers(0, 4),
    recent=st.integers(0, 2),
    own=st.integers(0, SIZE - 1),
    num_drafts=st.integers(1, 2 * SIZE),
)
def test_past_and_tail_are_all_pages_once_and_hold_every_token(
    make_device_kv, num_encoded, recent, own, num_drafts
):
    kv = make_device_kv(window_pages=7)
    encode(kv, PAGES[:num_encoded])
    newest = PAGES[num_encoded : num_encoded + recent]
    kv.open_pages(newest)
    kv.commit_pages(newest)
    position = (num_encoded + recent) * SIZE + own
    pages = pages_to(position, num_drafts)
    row = draft_row(kv, 1, position, pages, num_drafts)
    page_of_slot = {kv.window.slots.slot_of(page): page for page in kv.window.slots}
    assert [*row.past.tolist(), *(page_of_slot[slot] for slot in row.tail)] == pages.tolist()
    assert len(row.past) * SIZE + row.tail_len == position
    assert row.tail_len + num_drafts <= len(row.tail) * SIZE
    kv.check_integrity()


def test_a_full_window_of_pages_being_written_is_an_error(make_device_kv):
    kv = make_device_kv(window_pages=2)
    kv.open_pages([20 - 10, 12])
    with pytest.raises(CapacityError, match="all 2 pages"):
        draft_row(kv, 1, 3, torch.tensor([7]), 1)


def test_a_row_that_drafts_on_has_its_earlier_drafts_in_its_tail(kv):
    """A request that did not verify continues from its last draft, which lies in another page."""
    encode(kv, PAGES[:1])
    first = draft_row(kv, token=5, position=60, pages=pages_to(60, 10), num_drafts=10)
    assert (first.past.tolist(), first.tail_len) == ([7], 60 - SIZE)
    again = draft_row(kv, token=6, position=70, pages=pages_to(70, 30), num_drafts=30)
    assert (again.token, again.position, again.num_drafts) == (6, 70, 30)
    assert again.past.tolist() == [7]
    assert again.tail == [kv.window.slots.slot_of(page) for page in (2, 9, 4)]
    assert again.tail[:2] == list(first.tail)
    assert again.tail_len == 70 - SIZE


def test_a_row_reads_what_its_view_selects_before_its_tail(kv):
    encode(kv, PAGES[:3])
    kv.open_pages([4])
    seen = torch.tensor([0, 2, 3])
    row = draft_row(kv, 1, 4 * SIZE + 6, pages_to(4 * SIZE + 6, 2), 2, seen)
    assert row.past.tolist() == [7, 9]
    assert row.tail == [kv.window.slots.slot_of(page) for page in (4, 11)]


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("seen", [None, torch.tensor([0, 2, 3])])
def test_a_row_leaves_pages_without_anchors_out(make_kv, make_device_kv, device, seen):
    kv = (make_device_kv if device else make_kv)(window_pages=7, anchor_pages=2)
    encode(kv, PAGES[:3])
    kv.free_anchors(PAGES[:1])
    encode(kv, PAGES[3:4])
    kv.open_pages([11])
    row = draft_row(kv, 1, 5 * SIZE + 6, pages_to(5 * SIZE + 6, 2), 2, seen)
    # Page 9 was encoded while no place was free; page 4 has that of page 7.
    places = kv.anchor_places
    read = [2, 4] if seen is None else [4]
    assert row.past.tolist() == places.of(torch.tensor(read)).tolist()
    assert row.tail == [kv.window.slots.slot_of(page) for page in (11, 1)]
    assert row.tail_len == SIZE + 6


def test_a_row_whose_heads_select_different_pages(kv):
    """Lists that include pages of the tail become shorter, and are padded."""
    encode(kv, PAGES[:3])
    kv.open_pages([4])
    seen = torch.tensor([[[0, 1], [1, 3]], [[1, 2], [0, 2]], [[0, 3], [2, 3]]])
    lists = HeadLists(3, 2, torch.device("cpu"))
    row = draft_row(kv, 1, 4 * SIZE + 6, pages_to(4 * SIZE + 6, 2), 2, seen, lists=lists)
    lists = row.past.permute(1, 2, 0).tolist()
    assert lists == [[[7, 2], [2, -1]], [[2, 9], [7, 9]], [[7, -1], [9, -1]]]
    assert row.tail_len == SIZE + 6
