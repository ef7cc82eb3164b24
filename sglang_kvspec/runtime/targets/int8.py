"""Target `int8` on a GPU: KVSpec's kernel over anchors and corrections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kvspec_kernels.ops.attention import Tail, VerifyAttention
from kvspec_kernels.ops.triton_attention import most_rows
from sglang_kvspec.core.config import DEFAULT_PAGE_SIZE, Target
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.kv.transfers import fields_to_device, to_device
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.record_attention import (
    PARTS_OF_A_CALL,
    planned_target,
    target_workspace_nbytes,
    verifies_in_cuda,
)
from sglang_kvspec.runtime.target_attention import KV
from sglang_kvspec.runtime.targets.record_step import RecordStep
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize

# Query rows of a block of the CUDA kernel. More passes cost it little, unless sums have one order.
CUDA_TILES = (16, 32, 64, 128)
# Most memory of partial results of deterministic attention: of an eager call, and of the captured
# verifications of one max_qo_len. A larger forward is made in several calls, without a graph.
MOST_BYTES_OF_A_CALL, MOST_BYTES_CAPTURED = 2**28, 2**30


class Int8TargetAttention:
    """TargetAttention of VerifyAttention over anchors and corrections, up to PARTS_OF_A_CALL parts
    a call."""

    target: ClassVar[Target] = "int8"
    is_deterministic: ClassVar[bool] = False
    splits_by_page: ClassVar[bool] = True
    short_steps_differ: ClassVar[bool] = False

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        geometry = kv.geometry
        if geometry.page_size != DEFAULT_PAGE_SIZE:
            raise UnsupportedError(
                f"--kvspec-target int8 on a GPU needs --page-size {DEFAULT_PAGE_SIZE}, got "
                f"{geometry.page_size}"
            )
        self._kv, self._num_qo_heads = kv, num_qo_heads
        in_cuda = verifies_in_cuda(kv, num_qo_heads)
        self._most_rows = None if in_cuda else most_rows(geometry.head_dim)
        # One workspace for full batches and one for the rest. The kernel relies on its counters
        # being as it left them, but the scratch of another size begins where the counters of this
        # one end.
        self._workspaces = [torch.zeros(0, dtype=torch.uint8, device=kv.device) for _ in range(2)]
        self._batches: list[tuple[slice, VerifyAttention, tuple[torch.Tensor, ...]]] = []

    @property
    def query_tiles(self) -> tuple[int, ...]:
        """Query rows that a block of the kernel handles at once. CUDA: columns of 8."""
        most = self._most_rows or CUDA_TILES[-1]
        return tuple(tile for tile in CUDA_TILES if tile <= most)

    @property
    def rows_of_a_pass(self) -> int | None:
        return self._most_rows

    def plan(self, rows: TargetRows) -> None:
        self._batches = []
        device = self._kv.device
        names = ("past_pages", "tail_slots", "tail_lens", "tail_indptr", "past_indptr")
        on_device = fields_to_device(device, rows, names)
        for part in self._calls(rows):
            begin, end = int(rows.qo_indptr[part.start]), int(rows.qo_indptr[part.stop])
            qo_indptr = to_device(device, rows.qo_indptr[part.start : part.stop + 1] - begin)
            num_pages = _pages_of(rows, part) if self.is_deterministic else None
            attention = self._planned(qo_indptr, on_device, part, rows.max_qo_len, num_pages)
            tail = (
                on_device["tail_indptr"][part.start : part.stop + 1],
                on_device["tail_slots"],
                on_device["tail_lens"][part],
            )
            self._batches.append((slice(begin, end), attention, tail))

    def _calls(self, rows: TargetRows) -> Iterator[slice]:
        """Return the parts of each call."""
        first, num_parts = 0, len(rows.tail_lens)
        while first < num_parts:
            stop = min(first + PARTS_OF_A_CALL, num_parts)
            while self.is_deterministic and stop > first + 1:
                part = slice(first, stop)
                sizes = (stop - first, rows.max_qo_len, _pages_of(rows, part))
                nbytes = target_workspace_nbytes(self._kv, self._num_qo_heads, *sizes)
                if nbytes <= MOST_BYTES_OF_A_CALL:
                    break
                stop = first + (stop - first) // 2
            yield slice(first, stop)
            first = stop

    def _planned(
        self,
        qo_indptr: torch.Tensor,
        index: dict[str, torch.Tensor],
        part: slice,
        max_qo_len: int,
        num_pages: int | None,
    ) -> VerifyAttention:
        """num_pages: of all parts together, for deterministic attention."""
        kv, count = self._kv, part.stop - part.start
        nbytes = target_workspace_nbytes(kv, self._num_qo_heads, count, max_qo_len, num_pages)
        which = int(count < PARTS_OF_A_CALL)
        if len(self._workspaces[which]) < nbytes:
            self._workspaces[which] = torch.zeros(nbytes, dtype=torch.uint8, device=kv.device)
        page_size = kv.geometry.page_size
        return planned_target(
            kv,
            self._num_qo_heads,
            self._workspaces[which],
            qo_indptr,
            index["past_indptr"][part.start : part.stop + 1],
            index["past_pages"],
            torch.full((count,), page_size, dtype=torch.int32, device=kv.device),
            max_qo_len,
            is_captured=False,
            deterministic_pages=num_pages,
        )

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor:
        kv = self._kv
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for span, attention, index in self._batches:
            attention.run(
                q[span],
                kv.anchors.layer(layer),
                kv.residuals.cache_layer(layer),
                kv.residual_slots,
                Tail(*tail, *index),
                out=out[span],
                lse=lse[span],
            )
        return out

    def step(self, rows: DraftRows, batch: int) -> RecordStep:
        heads, is_deterministic = self._num_qo_heads, self.is_deterministic
        return RecordStep(self._kv, heads, rows, batch, is_deterministic=is_deterministic)

    def short_step(self, rows: DraftRows, batch: int) -> RecordStep:
        return self.step(rows, batch)

    def verifications(self, rows: VerifyRows) -> Int8Verifications:
        heads, is_deterministic = self._num_qo_heads, self.is_deterministic
        return Int8Verifications(self._kv, heads, rows, is_deterministic=is_deterministic)


class DeterministicInt8Attention(Int8TargetAttention):
    """Int8TargetAttention with one order of sums. A query reads every page before its own at 8
    bits, however many are computed together, so its bits depend on its position alone."""

    is_deterministic: ClassVar[bool] = True

    @property
    def query_tiles(self) -> tuple[int, ...]:
        return CUDA_TILES[-2:] if self._most_rows is None else (self._most_rows,)

    @property
    def rows_of_a_pass(self) -> int | None:
        """Query rows for which a block restores each page once."""
        return self._most_rows or CUDA_TILES[-1]


class Int8Verification:
    """CapturedTarget of KVSpec's kernel over anchors and corrections."""

    def __init__(
        self,
        kv: GpuKVCache,
        num_qo_heads: int,
        rows: VerifyRows,
        size: VerifySize,
        workspace: torch.Tensor,
        deterministic_pages: int | None,
    ) -> None:
        """workspace: zeroed, of target_workspace_nbytes() for rows.max_parts. Only verifications
        with this max_qo_len may share it. deterministic_pages: as for planned_target()."""
        self._kv, self.num_parts = kv, rows.max_parts
        self._attention = planned_target(
            kv,
            num_qo_heads,
            workspace,
            rows.qo_indptr,
            rows.past_indptr,
            rows.past_pages,
            rows.past_last,
            size.max_qo_len,
            num_likely=min(-(-size.num_tokens // size.max_qo_len), self.num_parts),
            deterministic_pages=deterministic_pages,
        )

    def plan(self, rows: TargetRows) -> None:
        """Do nothing: the kernel reads all it needs from VerifyRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        kv = self._kv
        anchors, residuals = kv.anchors.layer(layer), kv.residuals.cache_layer(layer)
        return self._attention.run(q, anchors, residuals, kv.residual_slots, tail)[0]


class Int8Verifications:
    """TargetVerifications of KVSpec's kernel, with a workspace for each max_qo_len."""

    def __init__(
        self, kv: GpuKVCache, num_qo_heads: int, rows: VerifyRows, *, is_deterministic: bool
    ) -> None:
        self._kv, self._num_qo_heads, self._rows = kv, num_qo_heads, rows
        self._is_deterministic = is_deterministic
        # Workspaces by max_qo_len. The kernel relies on its counters being as it left them, but the
        # scratch of another max_qo_len begins where the counters of this one end.
        self._workspaces: dict[int, torch.Tensor] = {}

    def has_room(self, size: VerifySize) -> bool:
        return not self._is_deterministic or self._nbytes(size) <= MOST_BYTES_CAPTURED

    def make(self, size: VerifySize) -> Int8Verification:
        nbytes = self._nbytes(size)
        workspace = self._workspaces.get(size.max_qo_len)
        # A deterministic one also grows with the number of tokens.
        if workspace is None or len(workspace) < nbytes:
            workspace = torch.zeros(nbytes, dtype=torch.uint8, device=self._kv.device)
            self._workspaces[size.max_qo_len] = workspace
        return Int8Verification(
            self._kv,
            self._num_qo_heads,
            self._rows,
            size,
            workspace,
            self._pages(size),
        )

    def _pages(self, size: VerifySize) -> int | None:
        """Return the most pages of all parts together, if deterministic. A part without tokens has
        no partial results, and each part has one page in its tail."""
        rows = self._rows
        if not self._is_deterministic:
            return None
        num_parts = min(size.num_tokens, rows.max_parts)
        return min(num_parts * rows.max_pages, len(rows.past_pages) + num_parts)

    def _nbytes(self, size: VerifySize) -> int:
        sizes = (self._rows.max_parts, size.max_qo_len, self._pages(size))
        return target_workspace_nbytes(self._kv, self._num_qo_heads, *sizes)


def _pages_of(rows: TargetRows, part: slice) -> int:
    """Return the pages of some parts together."""
    ends = (rows.past_indptr, rows.tail_indptr)
    return sum(int(each[part.stop] - each[part.start]) for each in ends)
