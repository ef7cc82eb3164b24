"""Full-precision pages of the newest tokens."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.recent_window import RecentWindow

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=16, page_size=32, dtype=torch.float32)


@pytest.fixture
def window():
    return RecentWindow(GEOMETRY, num_pages=9, num_slots=3, device=torch.device("cpu"))


def tokens(num: int, seed: int = 0):
    return torch.randn((2, num, 2, 16), generator=torch.Generator().manual_seed(seed))


def test_tokens_land_at_their_page_offset_and_layer(window):
    for page in (4, 8):
        window.slots.acquire(page)
    k, v = tokens(64)
    pages = torch.tensor([4, 8]).repeat(32)
    offsets = torch.arange(32).repeat_interleave(2)
    window.write(0, pages, offsets, k, v)
    window.write(1, pages, offsets, -k, -v)
    for layer, sign in ((0, 1), (1, -1)):
        got_k, got_v = window.read(layer, torch.tensor([8, 4]))
        assert torch.equal(got_k, sign * torch.stack((k[1::2], k[0::2])))
        assert torch.equal(got_v, sign * torch.stack((v[1::2], v[0::2])))


def test_a_later_write_replaces_only_its_tokens(window):
    window.slots.acquire(1)
    k, v = tokens(32)
    window.write(0, torch.full((32,), 1), torch.arange(32), k, v)
    k2, v2 = tokens(3, seed=1)
    window.write(0, torch.full((3,), 1), torch.tensor([30, 2, 7]), k2, v2)
    k[[30, 2, 7]], v[[30, 2, 7]] = k2, v2
    got_k, got_v = window.read(0, torch.tensor([1]))
    assert torch.equal(got_k[0], k)
    assert torch.equal(got_v[0], v)


def test_committed_pages_come_in_order_of_entry(window):
    for page in (7, 2, 5):
        window.slots.acquire(page)
    for page in (5, 7):
        window.mark_committed(page)
    assert window.committed_pages() == [7, 5]
    assert window.is_committed(5)
    assert not window.is_committed(2)
    window.check_integrity()


def test_leaving_forgets_that_a_page_was_committed(window):
    window.slots.acquire(7)
    window.mark_committed(7)
    assert window.release(7)
    assert not window.release(7)
    window.slots.acquire(7)
    assert not window.is_committed(7)
    assert window.committed_pages() == []


def test_only_a_page_in_the_window_can_be_committed(window):
    with pytest.raises(AssertionError, match="page 3 is not in the recent window"):
        window.mark_committed(3)


def test_holds_no_more_than_its_slots(window):
    for page in (1, 2, 3):
        window.slots.acquire(page)
    with pytest.raises(CapacityError):
        window.slots.acquire(4)


def test_bytes_are_those_of_plain_pages(window):
    assert window.nbytes == 3 * GEOMETRY.plain_page_bytes
    assert GEOMETRY.plain_page_bytes == 2 * 2 * 32 * 2 * 16 * 4


def test_integrity_check_sees_a_committed_page_without_a_slot(window):
    window.slots.acquire(1)
    window.mark_committed(1)
    window.slots.release(1)
    with pytest.raises(AssertionError, match="a committed page is not in the recent window"):
        window.check_integrity()
