"""A result is kept until the bytes that it was computed from change."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.page_memo import PageMemo

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=16, page_size=32, dtype=torch.float32)


class Compute:
    """Function that fills a page with the sum of its contents, and counts pages."""

    def __init__(self):
        self.num_pages = 0

    def __call__(self, *contents):
        self.num_pages += len(contents[0])
        total = sum(part.flatten(1).double().sum(1) for part in contents).float()
        pages = total[:, None, None, None].expand(-1, 32, 1, 16).clone()
        return pages, -pages


@pytest.fixture
def compute():
    return Compute()


def values(kv):
    assert torch.equal(kv[0], -kv[1])
    return kv[0][:, 0, 0, 0].tolist()


def contents(*pages, width=24):
    """Return two parts of each page: bytes that start with the given number, and as many zeros."""
    first = torch.zeros((len(pages), 1, width), dtype=torch.uint8)
    first[:, 0, 0] = torch.tensor(pages)
    return first, torch.zeros_like(first)


def test_computes_each_page_of_each_layer_once(compute):
    memo = PageMemo(GEOMETRY, 5, 48)
    assert values(memo.read(0, torch.tensor([3, 1]), contents(30, 10), compute)) == [30, 10]
    three = torch.tensor([1, 2, 3])
    assert values(memo.read(0, three, contents(10, 20, 30), compute)) == [10, 20, 30]
    assert compute.num_pages == 3
    assert values(memo.read(1, torch.tensor([1]), contents(11), compute)) == [11]
    assert compute.num_pages == 4


@pytest.mark.parametrize("width", [24, 13])
@pytest.mark.parametrize("part", [0, 1])
def test_any_changed_byte_is_seen(compute, part, width):
    memo = PageMemo(GEOMETRY, 5, 2 * width)
    slots = torch.tensor([4, 2])
    memo.read(0, slots, contents(40, 20, width=width), compute)
    changed = contents(40, 20, width=width)
    changed[part][1, 0, -1] += 1
    assert values(memo.read(0, slots, changed, compute)) == [40, 21]
    assert compute.num_pages == 3
    assert values(memo.read(0, slots, contents(40, 20, width=width), compute)) == [40, 20]


def test_floats_are_compared_bit_by_bit(compute):
    memo = PageMemo(GEOMETRY, 2, 16)
    slot = torch.tensor([1])
    for value in (0.0, -0.0, float("nan"), float("nan")):
        memo.read(0, slot, (torch.full((1, 4), value),), compute)
    assert compute.num_pages == 3


def test_what_is_read_belongs_to_the_reader(compute):
    memo = PageMemo(GEOMETRY, 2, 48)
    slot = torch.tensor([1])
    memo.read(0, slot, contents(7), compute)[0].zero_()
    assert values(memo.read(0, slot, contents(7), compute)) == [7]


def test_beyond_its_memory_limit_the_key_read_longest_ago_goes(compute):
    memo = PageMemo(GEOMETRY, 9, 48, 2 * (GEOMETRY.plain_page_bytes + 48))
    for key in (5, 6, 5, 7, 5, 6):
        assert values(memo.read(0, torch.tensor([key]), contents(key), compute)) == [key]
    assert compute.num_pages == 4


def test_a_read_of_more_keys_than_slots_keeps_nothing(compute):
    memo = PageMemo(GEOMETRY, 9, 48, GEOMETRY.plain_page_bytes + 48)
    for _ in range(2):
        two = memo.read(0, torch.tensor([1, 2]), contents(1, 2), compute)
        assert values(two) == [1, 2]
    assert compute.num_pages == 4


def test_reading_nothing_computes_nothing(compute):
    k, v = PageMemo(GEOMETRY, 2, 48).read(0, torch.empty(0, dtype=torch.int64), contents(), compute)
    assert k.shape == v.shape == (0, 32, 1, 16)
    assert compute.num_pages == 0
