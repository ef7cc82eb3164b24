"""FlashInfer over pages in place: its workspace, wrappers and plans."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.transfers import to_device
from sglang_kvspec.runtime.verify_sizes import VerifySize

WORKSPACE_BYTES = 384 * 2**20

# Query rows of FlashInfer's kernels: tokens times query heads of a KV head.
TILES = (16, 64, 128)
BLOCKS_OF_MULTIPROCESSOR = 2

# Attention output and log-sum-exp to base 2.
State = tuple[torch.Tensor, torch.Tensor]


class FlashInferPages:
    """FlashInfer's kernels for one rank, on one workspace, so that no two may run at once.

    Past pages are read from the residual cache: exact records have FlashInfer's HND layout, with
    strides of their own. Window pages are NHD.
    """

    def __init__(self, kv: GpuKVCache, num_qo_heads: int) -> None:
        # Import late: FlashInfer asks for a GPU when it is imported.
        import flashinfer

        self._flashinfer = flashinfer
        self.kv = kv
        geometry = kv.geometry
        self._heads = (
            *(num_qo_heads, geometry.num_kv_heads),
            *(geometry.head_dim, geometry.page_size),
        )
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=kv.device)

    def make_wrapper(self, layout: str, backend: str = "fa2", **options: Any) -> Any:
        """Make a wrapper of pages in this layout, HND or NHD."""
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, layout, backend=backend, **options
        )

    def make_ragged_wrapper(self, backend: str) -> Any:
        """Make a wrapper of requests whose K and V are concatenated, NHD."""
        return self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            self.workspace, "NHD", backend=backend
        )

    def plan_ragged(self, wrapper: Any, qo_indptr: torch.Tensor) -> None:
        """Let the tokens of request b see one another causally. qo_indptr: [batch_size + 1] int32
        on the CPU."""
        heads = self._heads[:3]
        wrapper.plan(qo_indptr, qo_indptr, *heads, causal=True, **self._dtypes)

    def plan_tail(
        self,
        wrapper: Any,
        qo_indptr: torch.Tensor,
        begins: torch.Tensor,
        slots: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        """Let the newest tokens of request b see window pages slots[begins[b] : begins[b + 1]]
        causally. last[b]: tokens in the last of these pages. All tensors are int32 on the CPU."""
        wrapper.plan(qo_indptr, begins, slots, last, *self._heads, causal=True, **self._dtypes)

    def plan_past(
        self, wrapper: Any, qo_indptr: torch.Tensor, begins: torch.Tensor, pages: torch.Tensor
    ) -> None:
        """Let every token of request b see all of pages[begins[b] : begins[b + 1]]. All tensors are
        on the CPU; qo_indptr, begins: [batch_size + 1] int32."""
        wrapper.plan(
            qo_indptr,
            begins,
            self.kv.residual_slots.index_select(0, to_device(self.kv.device, pages)),
            torch.where(begins.diff() > 0, self.kv.geometry.page_size, 0).int(),
            *self._heads,
            causal=False,
            **self._dtypes,
        )

    def merge(self, past: State, recent: State) -> torch.Tensor:
        """Return the attention output [num_tokens, num_qo_heads, head_dim] over past and recent
        tokens."""
        return self._flashinfer.merge_state(*past, *recent)[0]  # type: ignore[no-any-return]

    # Launches that are fixed before a graph is captured

    def num_captured_parts(self, size: VerifySize, max_rows: int) -> int:
        """Return how many requests a captured verification has room for; a replay may have fewer.

        FlashInfer chooses its kernel by the tokens that one request has if all others have one.
        """
        most = size.num_tokens - size.max_qo_len + 1
        return most if self._tile(size.max_qo_len) < TILES[-1] else min(most, max_rows)

    def has_room(self, size: VerifySize, num_parts: int) -> bool:
        """Return True if the workspace holds the outputs of parts of contexts before they are
        merged."""
        num_heads, num_kv_heads, head_dim, _ = self._heads
        tile = self._tile(size.num_tokens - num_parts + 1)
        tiles = -(-size.num_tokens * num_heads // num_kv_heads // tile) + num_parts
        properties = torch.cuda.get_device_properties(self.kv.device)
        blocks = BLOCKS_OF_MULTIPROCESSOR * properties.multi_processor_count
        tiles = max(tiles, blocks // num_kv_heads)
        nbytes = num_heads * tiles * tile * (head_dim + 1) * torch.float32.itemsize
        return nbytes <= len(self.workspace)

    def _tile(self, max_qo_len: int) -> int:
        """Return the query rows that a block of FlashInfer's kernel takes."""
        rows = max_qo_len * self._heads[0] // self._heads[1]
        return next((tile for tile in TILES if rows <= tile), TILES[-1])

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        dtype = self.kv.geometry.dtype
        return {"q_data_type": dtype, "kv_data_type": dtype}
