"""Rows copied between pools whose rows lie apart, compared byte by byte."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.ops.copy_rows import BLOCK_WORDS, copy_rows

HEADS = 2


def pool(rows, nbytes, device, seed=0, layers=3):
    """Return a layer of [rows, layers, HEADS, nbytes] random bytes."""
    rng = torch.Generator().manual_seed(seed)
    shape = (rows, layers, HEADS, nbytes)
    every = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    return every.to(device)


def ids(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


# Less than a block, a block, slightly more, and many blocks.
@pytest.mark.parametrize("words", [1, 12, BLOCK_WORDS // HEADS, BLOCK_WORDS, 5 * BLOCK_WORDS + 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_and_nothing_else(device, words, dtype):
    target, source = (pool(6, 4 * words, device, seed) for seed in (1, 2))
    want = target.clone()
    to, origin = [4, 0, 5], [2, 2, 1]
    want[to, 1] = source[origin, 1]
    copy_rows(target[:, 1], ids(to, device, dtype), source[:, 1], ids(origin, device, dtype))
    assert torch.equal(target, want)


def test_more_blocks_than_programs(device):
    target, source = (pool(90, 16, device, seed) for seed in (1, 2))
    to = torch.randperm(90, generator=torch.Generator().manual_seed(3))[:77]
    want = target.clone()
    want[to.to(device), 2] = source[:77, 2]
    copy_rows(target[:, 2], to.to(device), source[:, 2], torch.arange(77, device=device))
    assert torch.equal(target, want)


def test_no_rows(device):
    target = pool(2, 8, device)
    before = target.clone()
    copy_rows(target[:, 0], ids([], device), target[:, 1], ids([], device))
    assert torch.equal(target, before)


@pytest.mark.gpu
def test_rows_of_pinned_memory(device):
    target = pool(5, 4096, device, 1)
    source = pool(7, 4096, torch.device("cpu"), 2).pin_memory()
    want = target.cpu()
    want[[3, 1], 1] = source[[6, 0], 1]
    copy_rows(target[:, 1], ids([3, 1], device), source[:, 1], ids([6, 0], device))
    assert torch.equal(target.cpu(), want)
    with pytest.raises(ValueError, match="or pinned"):
        copy_rows(target[:, 1], ids([0], device), source.clone()[:, 1], ids([0], device))


def test_what_does_not_fit(device):
    good, rows = pool(4, 8, device)[:, 0], ids([1], device)
    with pytest.raises(ValueError, match="target must be uint8 with contiguous rows"):
        copy_rows(good.transpose(1, 2), rows, good, rows)
    with pytest.raises(ValueError, match="rows of target and source must have equal shapes"):
        copy_rows(good, rows, pool(4, 12, device)[:, 0], rows)
    with pytest.raises(ValueError, match="in whole words"):
        copy_rows(*[pool(4, 6, device, layers=2).flatten(2)[:, 0, :6], rows] * 2)
    with pytest.raises(ValueError, match="rows of target must start at multiples"):
        copy_rows(pool(4, 3, device)[:, 0], rows, good, rows)
    with pytest.raises(ValueError, match="target_rows must be integers"):
        copy_rows(good, rows.float(), good, rows)
    with pytest.raises(ValueError, match="equal lengths, got 1 and 2"):
        copy_rows(good, rows, good, ids([0, 1], device))
