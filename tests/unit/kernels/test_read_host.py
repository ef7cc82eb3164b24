"""Words that a kernel reads from pinned memory."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.ops.read_host import BLOCK_THREADS, MAX_BLOCKS, MAX_PARTS, read_host

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.parametrize("num_words", [0, 1, BLOCK_THREADS, 3 * BLOCK_THREADS * MAX_BLOCKS + 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_all_words_and_no_other(device, num_words, dtype):
    values = torch.randint(-(1 << 30), 1 << 30, (num_words + 2,)).to(dtype)
    target = torch.full((num_words + 2,), 7, dtype=dtype, device=device)
    source = values.pin_memory()
    read_host([(target[1:-1], source[1:-1])])
    torch.cuda.synchronize()
    values[[0, -1]] = 7
    assert torch.equal(target.cpu(), values)


@needs_gpu
@pytest.mark.parametrize("num_parts", [0, 2, MAX_PARTS, 2 * MAX_PARTS + 1])
def test_parts_of_all_sizes_at_once(device, num_parts):
    sizes = [(37 * i * i) % 9001 for i in range(num_parts)]
    sources = [torch.randint(1 << 30, (n,), dtype=torch.int32).pin_memory() for n in sizes]
    targets = [torch.zeros(n, dtype=torch.int32, device=device) for n in sizes]
    read_host(list(zip(targets, sources, strict=True)))
    torch.cuda.synchronize()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(targets, sources, strict=True))


@needs_gpu
def test_what_the_cpu_wrote_last_is_read(device):
    """Use one piece of memory repeatedly, as in a ring."""
    source = torch.zeros(1000, dtype=torch.int32).pin_memory()
    for number in range(50):
        source.fill_(number)
        target = torch.empty(1000, dtype=torch.int32, device=device)
        read_host([(target, source)])
        torch.cuda.synchronize()
        assert (target == number).all()


@needs_gpu
@pytest.mark.parametrize("nbytes", [3, 8])
def test_other_sizes_are_refused(device, nbytes):
    target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="equal sizes"):
        read_host([(target, torch.zeros(3, dtype=torch.uint8).pin_memory())])


def test_memory_that_a_kernel_cannot_read_is_refused():
    with pytest.raises(ValueError, match="pinned"):
        read_host([(torch.zeros(2), torch.zeros(2))])
