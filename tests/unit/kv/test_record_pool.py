"""Byte records come back as they were stored."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.kv.record_pool import RecordPool

CPU = torch.device("cpu")


def records(num: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, 2, 48), generator=rng, dtype=torch.uint8)


def test_reads_in_the_order_asked_for():
    pool = RecordPool(2, 8, 2, 48, CPU)
    data = records(3)
    pool.write(0, torch.tensor([5, 0, 7]), data)
    pool.write(1, torch.tensor([5, 0, 7]), 255 - data)
    assert torch.equal(pool.read(0, torch.tensor([7, 5, 5])), data[[2, 0, 0]])
    assert torch.equal(pool.read(1, torch.tensor([0])), 255 - data[1:2])


def test_other_slots_and_layers_keep_what_they_hold():
    pool = RecordPool(2, 4, 2, 48, CPU)
    every = torch.arange(4)
    for layer in range(2):
        pool.write(layer, every, records(4, seed=layer))
    pool.write(1, torch.tensor([2]), records(1, seed=9))
    assert torch.equal(pool.read(0, every), records(4, seed=0))
    assert torch.equal(pool.read(1, every[[0, 1, 3]]), records(4, seed=1)[[0, 1, 3]])
    assert torch.equal(pool.read(1, every[2:3]), records(1, seed=9))


def test_a_read_is_a_copy():
    pool = RecordPool(1, 4, 2, 48, CPU)
    pool.write(0, torch.tensor([1]), records(1))
    pool.read(0, torch.tensor([1])).zero_()
    assert torch.equal(pool.read(0, torch.tensor([1])), records(1))


def test_sizes():
    pool = RecordPool(3, 5, 2, 48, CPU)
    assert (pool.num_layers, pool.nbytes) == (3, 3 * 5 * 2 * 48)
    assert RecordPool(3, 0, 2, 48, CPU).nbytes == 0


def test_reading_nothing_from_a_pool_of_no_slots():
    nothing = torch.empty(0, dtype=torch.int64)
    assert RecordPool(1, 0, 2, 48, CPU).read(0, nothing).shape == (0, 2, 48)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_pool_is_refused(slot):
    pool = RecordPool(1, 4, 2, 48, CPU)
    with pytest.raises(IndexError):
        pool.read(0, torch.tensor([slot]))
    with pytest.raises(IndexError):
        pool.write(0, torch.tensor([slot]), records(1))


def test_layers_of_a_pool_by_page_are_views_of_whole_pages():
    pool = RecordPool(3, 4, 2, 48, CPU, by_page=True)
    assert pool.nbytes == 3 * 4 * 2 * 48
    for layer in range(3):
        pool.write(layer, torch.arange(4), records(4, seed=layer))
    page = pool.page(2)
    assert page.is_contiguous()
    for layer in range(3):
        assert torch.equal(page[layer], records(4, seed=layer)[2])
        assert torch.equal(pool.layer(layer), records(4, seed=layer))
    page.zero_()
    assert not pool.read(1, torch.tensor([2])).any()
    assert torch.equal(pool.read(1, torch.tensor([3])), records(4, seed=1)[3:])


def test_only_a_pool_by_page_has_pages_and_can_be_pinned():
    with pytest.raises(AssertionError, match="must be by page"):
        RecordPool(1, 4, 2, 48, CPU).page(0)
    with pytest.raises(AssertionError, match="only a pool by page"):
        RecordPool(1, 4, 2, 48, CPU, pinned=True)
