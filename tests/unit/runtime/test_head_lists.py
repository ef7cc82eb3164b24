"""Lists of pages by layer and KV head that a device keeps."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.runtime.head_lists import HeadLists

LAYERS, HEADS = 2, 3
PAGES = torch.tensor([40, 7, 22, 9, 31])


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def lists(device):
    return HeadLists(LAYERS, HEADS, device)


def seen_of(*by_head):
    """Return Row.seen with the lists of the first layer's heads; the second layer's are reversed by
    head."""
    rows = torch.tensor(by_head)
    return torch.stack((rows, rows.flip(0)))


def read(lists, pages, seen):
    """Return what each layer and head should read, without a device."""
    num_past = len(pages)
    return [
        [[int(pages[i]) for i in head.tolist() if i < num_past] for head in layer] for layer in seen
    ]


def by_head(past):
    return [
        [[page for page in head if page >= 0] for head in layer]
        for layer in past.permute(1, 2, 0).tolist()
    ]


@pytest.mark.parametrize("num_past", [5, 3, 1, 0])
def test_pages_of_the_tail_are_left_out(lists, device, num_past):
    seen = seen_of([0, 2, 4], [1, 2, 3], [0, 4, 5])
    past = lists.of(0, PAGES[:num_past], seen)
    assert (past.dtype, past.device.type) == (torch.int32, device.type)
    assert by_head(past) == read(lists, PAGES[:num_past], seen)
    assert len(past) == max(len(head) for layer in by_head(past) for head in layer)


def test_lists_are_made_anew_only_where_something_changed(lists):
    seen = seen_of([0, 1], [1, 2], [0, 2])
    first = lists.of(3, PAGES[:4], seen)
    # The same pages, in another tensor.
    assert lists.of(3, PAGES[:4].clone(), seen) is first
    moved = PAGES[:4].clone()
    moved[1] = 50
    again = lists.of(3, moved, seen)
    assert by_head(again) == read(lists, moved, seen)
    # A request that came into the slot has lists of its own, over equal pages.
    other = seen_of([2, 3], [0, 3], [1, 3])
    assert by_head(lists.of(3, moved, other)) == read(lists, moved, other)
    assert by_head(lists.of(3, moved[:3], other)) == read(lists, moved[:3], other)


def test_a_tensor_of_pages_that_changes_later_is_noticed(lists):
    seen, pages = seen_of([0, 1], [1, 2], [0, 2]), PAGES.clone()
    lists.of(0, pages, seen)
    pages[0] = 60
    assert by_head(lists.of(0, pages, seen)) == read(lists, pages, seen)


def test_requests_keep_lists_of_their_own(lists):
    seen = [seen_of([0, 1], [1, 2], [0, 2]), seen_of([1, 2], [0, 1], [0, 3])]
    pages = [PAGES, PAGES.flip(0)]
    made = [lists.of(slot, pages[slot], seen[slot]) for slot in (0, 1)]
    assert all(lists.of(slot, pages[slot], seen[slot]) is made[slot] for slot in (0, 1))


def test_lists_follow_pages_that_all_read(lists, device):
    seen = seen_of([0, 2], [1, 2], [0, 4])
    own = lists.of(0, PAGES[:4], seen)
    joined = lists.joined([PAGES[3:], own, PAGES[:0]])
    assert (joined.dtype, joined.device.type) == (torch.int32, device.type)
    assert joined[:2].unique(dim=-1).unique(dim=-2).flatten().tolist() == [9, 31]
    assert torch.equal(joined[2:], own)
    assert lists.joined([]).shape == (0, LAYERS, HEADS)
