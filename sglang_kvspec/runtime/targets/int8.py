"""Target `int8` on a GPU: KVSpec's kernel over anchors and corrections."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvspec_kernels.ops.attention import Tail, VerifyAttention
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
)
from sglang_kvspec.runtime.target_attention import KV
from sglang_kvspec.runtime.targets.record_step import RecordStep
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize


class Int8TargetAttention:
    """TargetAttention of VerifyAttention over anchors and corrections, up to PARTS_OF_A_CALL parts
    a call."""

    target: ClassVar[Target] = "int8"
    is_deterministic: ClassVar[bool] = False
    splits_by_page: ClassVar[bool] = True
    short_steps_differ: ClassVar[bool] = False
    # Query rows that a block of the kernel handles at once, in columns of 8.
    query_tiles: ClassVar[tuple[int, ...]] = (16, 32, 64, 128)
    rows_of_a_pass: ClassVar[int | None] = None

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        geometry = kv.geometry
        if geometry.page_size != DEFAULT_PAGE_SIZE:
            raise UnsupportedError(
                f"--kvspec-target int8 on a GPU needs --page-size {DEFAULT_PAGE_SIZE}, got "
                f"{geometry.page_size}"
            )
        self._kv, self._num_qo_heads = kv, num_qo_heads
        # One workspace for full batches and one for the rest. The kernel relies on its counters
        # being as it left them, but the scratch of another size begins where the counters of this
        # one end.
        self._workspaces = [torch.zeros(0, dtype=torch.uint8, device=kv.device) for _ in range(2)]
        self._batches: list[tuple[slice, VerifyAttention, tuple[torch.Tensor, ...]]] = []

    def plan(self, rows: TargetRows) -> None:
        self._batches = []
        num_rows = len(rows.tail_lens)
        device = self._kv.device
        names = ("past_pages", "tail_slots", "tail_lens", "tail_indptr", "past_indptr")
        on_device = fields_to_device(device, rows, names)
        for first in range(0, num_rows, PARTS_OF_A_CALL):
            stop = min(first + PARTS_OF_A_CALL, num_rows)
            begin = int(rows.qo_indptr[first])
            end = int(rows.qo_indptr[stop])
            qo_indptr = to_device(device, rows.qo_indptr[first : stop + 1] - begin)
            attention = self._planned(qo_indptr, on_device, slice(first, stop), rows.max_qo_len)
            tail = (
                on_device["tail_indptr"][first : stop + 1],
                on_device["tail_slots"],
                on_device["tail_lens"][first:stop],
            )
            self._batches.append((slice(begin, end), attention, tail))

    def _planned(
        self,
        qo_indptr: torch.Tensor,
        index: dict[str, torch.Tensor],
        part: slice,
        max_qo_len: int,
    ) -> VerifyAttention:
        kv, count = self._kv, part.stop - part.start
        nbytes = target_workspace_nbytes(kv, self._num_qo_heads, count, max_qo_len)
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
        return RecordStep(self._kv, self._num_qo_heads, rows, batch)

    def short_step(self, rows: DraftRows, batch: int) -> RecordStep:
        return self.step(rows, batch)

    def verifications(self, rows: VerifyRows) -> Int8Verifications:
        return Int8Verifications(self._kv, self._num_qo_heads, rows)


class Int8Verification:
    """CapturedTarget of KVSpec's kernel over anchors and corrections."""

    def __init__(
        self,
        kv: GpuKVCache,
        num_qo_heads: int,
        rows: VerifyRows,
        size: VerifySize,
        workspace: torch.Tensor,
    ) -> None:
        """workspace: zeroed, of target_workspace_nbytes() for rows.max_parts. Only verifications
        with this max_qo_len may share it."""
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
        )

    def plan(self, rows: TargetRows) -> None:
        """Do nothing: the kernel reads all it needs from VerifyRows."""

    def run(self, layer: int, q: torch.Tensor, tail: Tail) -> torch.Tensor:
        kv = self._kv
        anchors, residuals = kv.anchors.layer(layer), kv.residuals.cache_layer(layer)
        return self._attention.run(q, anchors, residuals, kv.residual_slots, tail)[0]


class Int8Verifications:
    """TargetVerifications of KVSpec's kernel, with a workspace for each max_qo_len."""

    def __init__(self, kv: GpuKVCache, num_qo_heads: int, rows: VerifyRows) -> None:
        self._kv, self._num_qo_heads, self._rows = kv, num_qo_heads, rows
        # Workspaces by max_qo_len. The kernel relies on its counters being as it left them, but the
        # scratch of another max_qo_len begins where the counters of this one end.
        self._workspaces: dict[int, torch.Tensor] = {}

    def has_room(self, size: VerifySize) -> bool:
        return True

    def make(self, size: VerifySize) -> Int8Verification:
        kv, num_qo_heads, rows = self._kv, self._num_qo_heads, self._rows
        if size.max_qo_len not in self._workspaces:
            nbytes = target_workspace_nbytes(kv, num_qo_heads, rows.max_parts, size.max_qo_len)
            workspace = torch.zeros(nbytes, dtype=torch.uint8, device=kv.device)
            self._workspaces[size.max_qo_len] = workspace
        workspace = self._workspaces[size.max_qo_len]
        return Int8Verification(kv, num_qo_heads, rows, size, workspace)
