"""Attention layers inside a CUDA graph: write KV into the window, then attend."""

from __future__ import annotations

from typing import Protocol

import torch

from kvspec_kernels.ops.append import append
from kvspec_kernels.ops.attention import Tail
from sglang_kvspec.kv.gpu_cache import GpuKVCache, RecordSlots
from sglang_kvspec.runtime.device_queries import DeviceQueries
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.side_stream import SideStream
from sglang_kvspec.runtime.step_attention import StepAttention
from sglang_kvspec.runtime.target_attention import CapturedTarget
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.wide_rows import WideRows


class CapturedLayers(Protocol):
    """Attention layers of one forward over rows whose addresses do not change."""

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Store k, v [num_tokens, num_kv_heads, head_dim], and attend from q [num_tokens,
        num_heads, head_dim]. Returns a tensor like q."""


class StepLayers:
    """Layers of a step: one token of each of the first rows of a DraftRows, or num_rows tokens of
    each of the first requests of a WideRows."""

    def __init__(
        self,
        kv: GpuKVCache,
        rows: DraftRows | WideRows,
        attention: StepAttention,
        num_rows: int = 1,
    ) -> None:
        self._kv, self._rows, self._attention = kv, rows, attention
        self._num_rows = num_rows

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        rows, batch = self._rows, len(q) // self._num_rows
        window = _store(self._kv, layer, rows, k, v)
        index = (rows.tail_indptr[: batch + 1], rows.tail_slots, rows.tail_lens[:batch])
        return self._attention.run(layer, q, Tail(*window, *index))


class VerifyLayers:
    """Layers of a verification: the first tokens of a VerifyRows, where a request may have
    several."""

    def __init__(
        self,
        kv: GpuKVCache,
        rows: VerifyRows,
        attention: CapturedTarget,
        queries: DeviceQueries | None = None,
    ) -> None:
        """queries: keeps the queries of all tokens."""
        self._kv, self._rows, self._attention, self._queries = kv, rows, attention, queries
        self._slots: RecordSlots | None = None

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        rows, parts = self._rows, self._attention.num_parts
        window = _store(self._kv, layer, rows, k, v)
        if self._queries is not None:
            self._queries.keep_all(layer, q)
        if rows.max_encoded:
            if layer == 0:
                # All layers of this forward use these slots.
                self._slots = self._kv.record_slots_of(rows.encode_pages)
            assert self._slots is not None
            # Tokens behind a page that this forward fills must read it as it is encoded.
            self._kv.encode_from(layer, *window, rows.encode_source, self._slots)
        index = (rows.tail_indptr[: parts + 1], rows.tail_slots, rows.tail_lens[:parts])
        return self._attention.run(layer, q, Tail(*window, *index))


class PiggybackLayers:
    """Layers of a draft step, and behind its tokens a verification of other requests. A GPU runs
    both at once: small kernels and last blocks of each run where the other leaves room."""

    def __init__(
        self,
        drafts: StepLayers,
        num_drafts: int,
        verification: VerifyLayers,
        side: SideStream,
    ) -> None:
        self._drafts, self._num_drafts, self._verification = drafts, num_drafts, verification
        self._side = side

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        count = self._num_drafts
        with self._side:
            drafted = self._drafts.forward(layer, q[:count], k[:count], v[:count])
        verified = self._verification.forward(layer, q[count:], k[count:], v[count:])
        self._side.join()
        return torch.cat((drafted, verified))


def _store(
    kv: GpuKVCache,
    layer: int,
    rows: DraftRows | WideRows | VerifyRows,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the tokens' KV to its places in the layer's window. Returns the window's K and V."""
    num_tokens = len(k)
    window_k, window_v = kv.window.layer(layer)
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    append(k, v, window_k, window_v, rows.slots[:num_tokens], rows.offsets[:num_tokens])
    return window_k, window_v
