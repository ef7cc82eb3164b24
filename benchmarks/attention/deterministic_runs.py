"""Deterministic attention on the same shapes, through its public wrapper."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attention.shapes import HEAD_DIM, KV_HEADS, PAGE_SIZE, QO_HEADS, Shape
from kvspec_kernels.ops.attention import Tail
from kvspec_kernels.ops.deterministic_attention import Past, deterministic_attention, num_chunks


class DeterministicRuns:
    """Random pages of the past and a tail of two pages for each request."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        pool = (2, shape.num_pages, KV_HEADS, PAGE_SIZE, HEAD_DIM)
        self._past = torch.randn(pool, device="cuda", dtype=torch.bfloat16)
        tail = (2, shape.batch * 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self._tail = torch.randn(tail, device="cuda", dtype=torch.bfloat16)
        self._slots = torch.randperm(shape.num_pages, device="cuda").int()
        rows = (shape.batch, PAGE_SIZE, QO_HEADS, HEAD_DIM)
        self._queries = torch.randn(rows, device="cuda", dtype=torch.bfloat16)

    def call(self, num_new: int, batch: int | None = None) -> Callable[[], torch.Tensor]:
        """Return a call with the newest num_new tokens of the first `batch` requests (None: all)
        as queries. It returns [batch, num_new, heads, head size]."""
        batch = self.shape.batch if batch is None else batch
        steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        pages = self.shape.context // PAGE_SIZE
        past = Past(
            *self._past,
            self._slots,
            steps * pages,
            torch.arange(batch * pages, dtype=torch.int32, device="cuda"),
        )
        lens = torch.full((batch,), 2 * PAGE_SIZE, dtype=torch.int32, device="cuda")
        slots = torch.arange(2 * batch, dtype=torch.int32, device="cuda")
        tail = Tail(*self._tail, steps * 2, slots, lens)
        queries = self._queries[:batch, PAGE_SIZE - num_new :].flatten(0, 1)
        chunks = num_chunks(pages + 2, PAGE_SIZE)
        parts = torch.empty(len(queries), chunks, QO_HEADS, HEAD_DIM + 2, device="cuda")
        out = torch.empty_like(queries)

        def attend() -> torch.Tensor:
            deterministic_attention(queries, past, tail, steps * num_new, num_new, out, parts)
            return out.unflatten(0, (batch, num_new))

        return attend

    def nbytes(self) -> int:
        """Return the bytes of K and V that a call over all requests reads."""
        return 2 * (self._past.numel() + self._tail.numel())
