"""The exact target on a GPU: FlashInfer over the raw bits that are the exact residual."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.target_rows import TargetRows
from sglang_kvspec.kv.transfers import to_device
from sglang_kvspec.runtime.side_stream import SideStream
from sglang_kvspec.runtime.verify_sizes import VerifySize

WORKSPACE_BYTES = 384 * 2**20

# Query tokens of a request from which on FA3 is quicker: it does not split contexts over
# multiprocessors, which few tokens need, and multiplies faster.
MANY_QUERIES = 128

# Of FlashInfer's kernels, each for more query rows: tokens times query heads of a KV head.
TILES = (16, 64, 128)
BLOCKS_OF_MULTIPROCESSOR = 2

# Attention output and log-sum-exp to base 2.
State = tuple[torch.Tensor, torch.Tensor]
KV = tuple[torch.Tensor, torch.Tensor]


class ExactAttention:
    """Past pages are read where they lie in the residual cache: exact records are FlashInfer's HND
    layout with strides of their own. The tail is a second state, and both are merged."""

    query_tiles = TILES[:-1]

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        # Late: FlashInfer asks for a GPU when it is imported.
        import flashinfer

        self._flashinfer = flashinfer
        self.kv = kv
        geometry = kv.geometry
        self._heads = (
            *(num_qo_heads, geometry.num_kv_heads),
            *(geometry.head_dim, geometry.page_size),
        )
        # For what a step has to attend to besides.
        self.beside = SideStream(kv.device)
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=kv.device)
        self._few = (self.make_wrapper("HND"), self.make_wrapper("NHD"))
        self._many = (
            self.make_wrapper("HND", backend="fa3"),
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", backend="fa3"),
        )
        self._past, self._tail = self._few
        self._has_past = self._many_queries = False

    def make_wrapper(self, layout: str, backend: str = "fa2", **options: Any) -> Any:
        """A FlashInfer wrapper on the workspace that all of them share, one at a time."""
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, layout, backend=backend, **options
        )

    def plan(self, rows: TargetRows) -> None:
        size = self.kv.geometry.page_size
        self._many_queries = rows.max_qo_len >= MANY_QUERIES and rows.begins_pages
        self._past, self._tail = self._many if self._many_queries else self._few
        self._has_past = len(rows.past_pages) > 0
        if self._has_past:
            self.plan_past(self._past, rows.qo_indptr, rows.past_indptr, rows.past_pages)
        if self._many_queries:
            self._tail.plan(
                rows.qo_indptr,
                rows.qo_indptr,
                *self._heads[:3],
                causal=True,
                **self._dtypes,
            )
            return
        last = rows.tail_lens - (rows.tail_indptr.diff() - 1) * size
        self.plan_tail(self._tail, rows.qo_indptr, rows.tail_indptr, rows.tail_slots, last.int())

    def plan_tail(
        self,
        wrapper: Any,
        qo_indptr: torch.Tensor,
        begins: torch.Tensor,
        slots: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        """Let the tokens of request b, its newest, see window pages slots[begins[b] : begins[b +
        1]] causally, of which the last has last[b] tokens. All int32 on the CPU."""
        wrapper.plan(qo_indptr, begins, slots, last, *self._heads, causal=True, **self._dtypes)

    def plan_past(
        self, wrapper: Any, qo_indptr: torch.Tensor, begins: torch.Tensor, pages: torch.Tensor
    ) -> None:
        """Let every token of request b see all of pages[begins[b] : begins[b + 1]]. All on the CPU;
        qo_indptr, begins: [batch_size + 1] int32."""
        wrapper.plan(
            qo_indptr,
            begins,
            self.kv.residual_slots.index_select(0, to_device(self.kv.device, pages)),
            torch.where(begins.diff() > 0, self.kv.geometry.page_size, 0).int(),
            *self._heads,
            causal=False,
            **self._dtypes,
        )

    # Launches that are fixed before a graph is captured

    def num_captured_parts(self, size: VerifySize, max_rows: int) -> int:
        """Requests that a captured verification has room for, some of which are never there: from
        how many tokens one has if all others have one, FlashInfer chooses its kernel."""
        most = size.num_tokens - size.max_qo_len + 1
        return most if self._tile(size.max_qo_len) < TILES[-1] else min(most, max_rows)

    def captured_bytes(self, size: VerifySize, num_parts: int) -> int:
        """Of the workspace, for outputs of parts of contexts before they are merged."""
        num_heads, num_kv_heads, head_dim, _ = self._heads
        tile = self._tile(size.num_tokens - num_parts + 1)
        tiles = -(-size.num_tokens * num_heads // num_kv_heads // tile) + num_parts
        properties = torch.cuda.get_device_properties(self.kv.device)
        blocks = BLOCKS_OF_MULTIPROCESSOR * properties.multi_processor_count
        tiles = max(tiles, blocks // num_kv_heads)
        return num_heads * tiles * tile * (head_dim + 1) * torch.float32.itemsize

    def _tile(self, max_qo_len: int) -> int:
        """Tokens times query heads of a KV head that a block of FlashInfer's kernel takes."""
        rows = max_qo_len * self._heads[0] // self._heads[1]
        return next((tile for tile in TILES if rows <= tile), TILES[-1])

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        dtype = self.kv.geometry.dtype
        return {"q_data_type": dtype, "kv_data_type": dtype}

    def run(self, layer: int, q: torch.Tensor, tail: KV, new: KV) -> torch.Tensor:
        """q [num_tokens, heads, head_dim] over past and `tail`: (k, v), each [slots, page_size,
        num_kv_heads, head_dim]; new: what q's tokens added to it, [num_tokens, num_kv_heads,
        head_dim]."""
        recent_kv = new if self._many_queries else (tail,)
        if not self._has_past:
            return self._tail.run(q, *recent_kv)  # type: ignore[no-any-return]
        past = self._past.run(q, self.kv.exact_pages(layer), return_lse=True)
        recent = self._tail.run(q, *recent_kv, return_lse=True)
        return self.merge(past, recent)

    def merge(self, past: State, recent: State) -> torch.Tensor:
        """The attention output over both."""
        return self._flashinfer.merge_state(*past, *recent)[0]  # type: ignore[no-any-return]
