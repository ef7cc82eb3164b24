"""Problems to time, of Llama-8B geometry: attention over pages of 64 tokens, and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
# [N, K] of the weights of a layer.
WEIGHTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
# Several times the size of the L2 cache, so that no call finds its input there.
ROTATED_BYTES = 2**29
MOST_BYTES = 48 * 2**30
MOST_COPIES = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Batch of requests of equal length."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"

    @property
    def num_pages(self) -> int:
        return self.batch * self.context // PAGE_SIZE

    def values(self) -> int:
        """Return the number of elements of K and V together."""
        return self.batch * self.context * KV_HEADS * HEAD_DIM * 2

    def rotations(self, nbytes: int) -> int:
        """Return how many inputs of `nbytes` to use in turn."""
        return min(MOST_COPIES, -(-ROTATED_BYTES // nbytes))

    def page_tables(self, copies: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Return indptr, a shuffled page list for each of `copies` disjoint sets of pages, and
        last_page_len, all int32 on the GPU."""
        steps = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda")
        shuffled = torch.randperm(self.num_pages * copies, device="cuda").int()
        last = torch.full((self.batch,), PAGE_SIZE, dtype=torch.int32, device="cuda")
        lists = [part.contiguous() for part in shuffled.chunk(copies)]
        return steps * (self.context // PAGE_SIZE), lists, last


GRID = tuple(
    Shape(batch, context)
    for batch in (1, 4, 16, 64)
    for context in (4096, 16384, 32768, 131072)
    if Shape(batch, context).values() * 2 <= MOST_BYTES
)
MAIN = Shape(16, 32768)
ARITHMETIC_SHAPES = (Shape(1, 32768), Shape(4, 4096), MAIN, Shape(64, 16384))
