"""Registered memory gives views of the right bytes, and only of pages of the same generation."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.transport import PageMemory, Stream


def test_a_view_is_a_record_of_a_pool() -> None:
    pools = [RecordPool(3, 5, 2, size, torch.device("cpu")) for size in (7, 11)]
    tensors = [[pool.layer(layer) for layer in range(3)] for pool in pools]
    memory = PageMemory(tensors, lambda page, generation: generation == 10 + page)
    for stream in Stream:
        assert memory.chunk_bytes(stream) == 2 * (7, 11)[stream]
        view = memory.view(stream, 4, 14, 2)
        assert view is not None
        view[:] = bytes(range(len(view)))
        record = pools[stream].layer(2)[4]
        assert record.flatten().tolist() == list(range(len(view)))
        assert memory.view(stream, 4, 15, 2) is None


def test_pages_that_are_not_there_are_refused() -> None:
    memory = PageMemory([[torch.zeros(3, 4, dtype=torch.uint8)]], lambda page, generation: True)
    for page in (-1, 3):
        with pytest.raises(TransportError, match=f"page {page} is outside the 3 pages"):
            memory.view(Stream.ANCHOR, page, 0, 0)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.uint8).T],
    ids=["float", "strided"],
)
def test_memory_that_is_not_plain_bytes_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TransportError, match="contiguous uint8"):
        PageMemory([[tensor]], lambda page, generation: True)
