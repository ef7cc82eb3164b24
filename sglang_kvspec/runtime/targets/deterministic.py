"""Deterministic attention at the `exact` target, for SGLang's deterministic inference.

Prefill, verification and single steps give the same bits, so that drafting changes no token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from kvspec_kernels.ops.attention import Tail
from kvspec_kernels.ops.deterministic_attention import (
    BLOCK_ROWS,
    Past,
    deterministic_attention,
    launch_of,
    num_chunks,
)
from sglang_kvspec.core.config import Target
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.kv.transfers import fields_to_device
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows
from sglang_kvspec.runtime.target_attention import KV
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize

# Most queries of a request whose chunks programs share. More queries fill the device by themselves.
MOST_SHARED = 64
# Most memory of partial results. Contexts of a million tokens would need gigabytes.
MOST_BYTES = 2**30


class Scratch:
    """Memory of the kernel's partial results, for runs that never overlap. Graphs keep the memory
    that they were captured with."""

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        self._kv, self._num_qo_heads = kv, num_qo_heads
        self._memory = torch.empty(0, dtype=torch.float32, device=kv.device)

    def parts(self, num_tokens: int, num_pages: int) -> torch.Tensor | None:
        """Return `parts` for num_tokens queries of requests with up to num_pages pages each.

        None if they would take more than MOST_BYTES: then a program has all chunks of a request.
        """
        geometry = self._kv.geometry
        chunks = max(num_chunks(num_pages, geometry.page_size), 1)
        shape = (num_tokens, chunks, self._num_qo_heads, geometry.head_dim + 2)
        count = math.prod(shape)
        if count * self._memory.itemsize > MOST_BYTES:
            return None
        if len(self._memory) < count:
            self._memory = self._memory.new_empty(count)
        return self._memory[:count].view(shape)


class DeterministicAttention:
    """TargetAttention whose kernel adds the pages of past and tail in one fixed order."""

    target: ClassVar[Target] = "exact"
    is_deterministic: ClassVar[bool] = True
    splits_by_page: ClassVar[bool] = False
    short_steps_differ: ClassVar[bool] = False
    query_tiles: ClassVar[tuple[int, ...]] = (BLOCK_ROWS,)
    # On an H200, 21 tokens of 16 requests with groups of 4 take 1.7 times as long as 16 tokens.
    rows_of_a_pass: ClassVar[int | None] = BLOCK_ROWS

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        geometry = kv.geometry
        try:
            launch_of(geometry.page_size, geometry.head_dim, geometry.dtype, kv.device)
        except ValueError as error:
            raise UnsupportedError(
                f"deterministic attention at --kvspec-target exact: {error}"
            ) from error
        self._kv = kv
        self._scratch = Scratch(kv, num_qo_heads)
        self._max_qo_len = 1
        self._parts: torch.Tensor | None = None
        self._index: dict[str, torch.Tensor] = {}

    def plan(self, rows: TargetRows) -> None:
        self._max_qo_len = rows.max_qo_len
        names = ("qo_indptr", "past_indptr", "past_pages", "tail_indptr", "tail_slots", "tail_lens")
        self._index = fields_to_device(self._kv.device, rows, names)
        self._parts = None
        if rows.max_qo_len <= MOST_SHARED:
            pages = rows.past_indptr.diff() + rows.tail_indptr.diff()
            self._parts = self._scratch.parts(rows.num_tokens, int(pages.max()))

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor:
        index = self._index
        return deterministic_attention(
            q,
            past_of(self._kv, layer, index["past_indptr"], index["past_pages"]),
            Tail(*tail, index["tail_indptr"], index["tail_slots"], index["tail_lens"]),
            index["qo_indptr"],
            self._max_qo_len,
            parts=self._parts,
        )

    def step(self, rows: DraftRows, batch: int) -> DeterministicStep:
        return DeterministicStep(self._kv, self._scratch, rows, batch)

    def short_step(self, rows: DraftRows, batch: int) -> DeterministicStep:
        return self.step(rows, batch)

    def verifications(self, rows: VerifyRows) -> DeterministicVerifications:
        return DeterministicVerifications(self._kv, self._scratch, rows)


class DeterministicStep:
    """StepAttention of the same kernel."""

    def __init__(self, kv: GpuKVCache, scratch: Scratch, rows: DraftRows, batch: int) -> None:
        self._kv, self._rows, self._batch = kv, rows, batch
        self._parts = scratch.parts(batch, len(rows.past_pages) // rows.max_batch)
        self._every = torch.arange(batch + 1, dtype=torch.int32, device=kv.device)

    def plan(self, rows: Sequence[DraftRow]) -> None:
        """Do nothing: the kernel reads all it needs from DraftRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        begins = self._rows.past_indptr[: self._batch + 1]
        past = past_of(self._kv, layer, begins, self._rows.past_pages)
        return deterministic_attention(q, past, tail, self._every, 1, parts=self._parts)


class DeterministicVerification:
    """CapturedTarget of the same kernel."""

    def __init__(
        self, kv: GpuKVCache, scratch: Scratch, rows: VerifyRows, size: VerifySize
    ) -> None:
        self._kv, self._rows, self._size = kv, rows, size
        self._parts = scratch.parts(size.num_tokens, len(rows.past_pages) // rows.max_rows)
        self.num_parts = rows.max_parts

    def plan(self, rows: TargetRows) -> None:
        """Do nothing: the kernel reads all it needs from VerifyRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        rows = self._rows
        past = past_of(self._kv, layer, rows.past_indptr, rows.past_pages)
        # The kernel writes only the rows of tokens that exist.
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        index = (rows.qo_indptr, self._size.max_qo_len)
        return deterministic_attention(q, past, tail, *index, out, self._parts)


class DeterministicVerifications:
    """TargetVerifications of the same kernel."""

    def __init__(self, kv: GpuKVCache, scratch: Scratch, rows: VerifyRows) -> None:
        self._kv, self._scratch, self._rows = kv, scratch, rows

    def has_room(self, size: VerifySize) -> bool:
        return True

    def make(self, size: VerifySize) -> DeterministicVerification:
        return DeterministicVerification(self._kv, self._scratch, self._rows, size)


def past_of(kv: GpuKVCache, layer: int, indptr: torch.Tensor, pages: torch.Tensor) -> Past:
    """Return the past of each request b, read in place: encoded pages[indptr[b] : indptr[b + 1]].
    indptr, pages: int32 on the device."""
    return Past(*kv.exact_pages(layer), kv.residual_slots, indptr, pages)
