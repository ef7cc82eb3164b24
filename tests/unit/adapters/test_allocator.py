"""The pool learns of every page that SGLang's allocator frees, when it is free, and not before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvspec_patches import paged_free
from sglang_kvspec.adapters.allocator import KVSpecAllocator, TorchPagedAllocator

SIZE = 4
NUM_PAGES = 6


class Pool:
    """Record of freed pages, one list a report."""

    def __init__(self) -> None:
        self.reports: list[list[int]] = []

    def on_pages_freed(self, pages: list[int]) -> None:
        self.reports.append(pages)

    def on_all_pages_freed(self) -> None:
        self.reports.append([])

    @property
    def freed(self) -> list[int]:
        """Pages of all reports."""
        return [page for report in self.reports for page in report]


def make(kind: type[TorchPagedAllocator], pool: object) -> TorchPagedAllocator:
    return kind(NUM_PAGES * SIZE, SIZE, torch.float32, "cpu", pool, need_sort=False)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def slots() -> torch.Tensor:
    """Slots of pages 2, 1 and 3, the last of them partial."""
    pages = torch.tensor([2, 1, 3]).repeat_interleave(SIZE) * SIZE
    return (pages + torch.arange(SIZE).repeat(3))[:-1]


def test_each_free_reports_its_pages(pool: Pool, slots: torch.Tensor) -> None:
    allocator = make(KVSpecAllocator, pool)
    assert pool.reports == [[]]
    allocator.alloc(4 * SIZE)
    allocator.free(slots)
    assert sorted(pool.freed) == [1, 2, 3]
    allocator.free(slots[:0])
    assert sorted(pool.freed) == [1, 2, 3]
    assert sorted(allocator.free_pages.tolist()) == [1, 2, 3, 5, 6]


def test_a_group_reports_once_it_ends(pool: Pool, slots: torch.Tensor) -> None:
    allocator = make(KVSpecAllocator, pool)
    allocator.alloc(4 * SIZE)
    allocator.free_group_begin()
    for part in (slots[: SIZE // 2], slots[SIZE // 2 : SIZE], slots[SIZE:]):
        allocator.free(part)
    assert not pool.freed
    allocator.free_group_end()
    assert sorted(pool.freed) == [1, 2, 3]


def test_a_hook_of_free_reports_what_the_call_has_freed(pool: Pool, slots: torch.Tensor) -> None:
    allocator = make(TorchPagedAllocator, pool)
    allocator.free_group_begin()
    paged_free.hook(None, allocator, slots)
    assert not pool.freed
    allocator.free_group_end()
    paged_free.hook(None, allocator, slots)
    assert pool.freed == [1, 2, 3]


def test_a_hook_of_free_leaves_other_pools_alone(slots: torch.Tensor) -> None:
    paged_free.hook(None, make(TorchPagedAllocator, SimpleNamespace()), slots)
