"""Scores of a request's pages by the queries of verified tokens, and selection of the pages that
its drafts read. Everything stays on the device: lists of pages go to fixed memory that captured
draft steps read."""

from __future__ import annotations

import math

import torch
import triton

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import anchor_layout
from kvspec_kernels.jit.functions import kernel_function
from kvspec_kernels.jit.page_selection import page_lse_kernel, page_mass_kernel, select_kernel
from kvspec_kernels.ops.attention_plan import check_index, check_tensor
from kvspec_kernels.ops.triton_attention import INTERPRETED, TRITON_DTYPES
from kvspec_kernels.reference.codec import kernel_reference_of

# Parts of a request's pages that are scored by programs of their own.
NUM_SPLITS = 16
# Values of log-sum-exps that a program of the mass kernel loads at a time.
MASS_TILE = 4096


class PageSelection:
    """Selection for up to max_batch requests of max_pages pages together, in memory whose addresses
    never change.

    Request b has pages indices[indptr[b] : indptr[b + 1]], all of them encoded and full, and
    num_queries[b] queries; without pages or queries it is skipped. score() is called for each
    layer, then select() once. Neither allocates nor waits for the device. CUDA graphs may hold
    both: the index tensors are read on the device.
    """

    def __init__(
        self,
        max_batch: int,
        max_pages: int,
        num_layers: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        most_queries: int,
        *,
        settings: CodecSpec,
        q_dtype: torch.dtype,
        device: torch.device,
        sm_scale: float | None = None,
    ) -> None:
        """most_queries: of a request. sm_scale: 1 / sqrt(head_dim) unless given."""
        self.max_batch, self.num_kv_heads = max_batch, num_kv_heads
        self.q_shape = (max_batch, most_queries, num_qo_heads, head_dim)
        self.q_dtype, self.device = q_dtype, device
        group = num_qo_heads // num_kv_heads
        num_rows = most_queries * group
        self._lse = torch.empty(
            (max_pages, num_kv_heads, num_rows), dtype=torch.float32, device=device
        )
        self.mass = torch.zeros(
            (num_layers, max_pages, num_kv_heads), dtype=torch.float32, device=device
        )
        block_m = max(16, triton.next_power_of_2(num_rows))
        layout, decode = (
            anchor_layout(settings, page_size, head_dim),
            settings.triton_decode(page_size),
        )
        self._shared = {"NUM_KV_HEADS": num_kv_heads, "GROUP": group, "NUM_ROWS": num_rows}
        self._keys = {
            "table_ptr": kernel_reference_of(settings).code_values(settings, device, refined=False),
            "scale_log2": (head_dim**-0.5 if sm_scale is None else sm_scale) * math.log2(math.e),
            "DECODE": kernel_function(decode.function),
            "ANCHOR_BITS": settings.anchor_bits,
            "PAGE_SIZE": page_size,
            "HEAD_DIM": head_dim,
            "K_CHUNK": decode.chunks[0],
            "K_CODES": layout["k_codes"].offset,
            "K_OFFSET": layout[f"k_{decode.offset}"].offset,
            "K_SCALE": layout["k_scale"].offset,
            "DTYPE": TRITON_DTYPES[q_dtype],
            "FINITE_MAX": torch.finfo(q_dtype).max,
            "INTERPRET": INTERPRETED,
            "NUM_SPLITS": NUM_SPLITS,
            "BLOCK_M": block_m,
            "BLOCK_N": 64 if page_size % 64 == 0 else 32,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        }
        self._mass = {"BLOCK_M": block_m, "BLOCK_P": max(1, MASS_TILE // block_m)}
        self._nbytes = layout.nbytes

    def score(
        self,
        layer: int,
        q: torch.Tensor,
        anchors: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        num_queries: torch.Tensor,
    ) -> None:
        """Set mass[layer] of the pages of all requests.

        q: [max_batch, most_queries, num_qo_heads, head_dim], of which request b's first
        num_queries[b] count. anchors: [num_pages, num_kv_heads, nbytes] uint8 of the layer. indptr
        [max_batch + 1], indices, num_queries [max_batch]: int32. Raises ValueError for other
        shapes.
        """
        check_tensor("q", q, self.q_shape, self.q_dtype, self.device)
        check_tensor(
            "anchors", anchors, (None, self.num_kv_heads, self._nbytes), torch.uint8, self.device
        )
        check_index("indptr", indptr, self.device, self.max_batch + 1)
        check_index("indices", indices, self.device)
        check_index("num_queries", num_queries, self.device, self.max_batch)
        page_lse_kernel[(self.max_batch, NUM_SPLITS, self.num_kv_heads)](
            q_ptr=q,
            anchors_ptr=anchors,
            indptr_ptr=indptr,
            indices_ptr=indices,
            num_queries_ptr=num_queries,
            lse_ptr=self._lse,
            stride_q_request=q.stride(0),
            stride_q_token=q.stride(1),
            stride_q_head=q.stride(2),
            stride_anchor_page=anchors.stride(0),
            stride_anchor_head=anchors.stride(1),
            **self._shared,
            **self._keys,
            num_warps=4,
            num_stages=1,
        )
        page_mass_kernel[(self.max_batch, self.num_kv_heads)](
            lse_ptr=self._lse,
            indptr_ptr=indptr,
            num_queries_ptr=num_queries,
            mass_ptr=self.mass[layer],
            **self._shared,
            **self._mass,
            num_warps=4,
        )

    def select(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        out_indptr: torch.Tensor,
        out: torch.Tensor,
        num_last: torch.Tensor,
        *,
        num_first: int,
        most_pages: int,
    ) -> None:
        """Write the selected pages of request b, in order, to out[out_indptr[b] : out_indptr[b +
        1]]: as many as the list is long, and -1 behind them if there are fewer pages.

        out: [num_out, num_layers, num_kv_heads] int32. num_first, num_last [max_batch]: first and
        last pages that are always selected. most_pages: most pages of a request.
        """
        num_layers = len(self.mass)
        shape = (None, num_layers, self.num_kv_heads)
        check_tensor("out", out, shape, torch.int32, self.device)
        check_index("out_indptr", out_indptr, self.device, self.max_batch + 1)
        check_index("num_last", num_last, self.device, self.max_batch)
        select_kernel[(self.max_batch, self.num_kv_heads, num_layers)](
            mass_ptr=self.mass,
            indptr_ptr=indptr,
            indices_ptr=indices,
            out_ptr=out,
            out_indptr_ptr=out_indptr,
            num_last_ptr=num_last,
            stride_mass_layer=self.mass.stride(0),
            stride_out_index=out.stride(0),
            stride_out_layer=out.stride(1),
            NUM_KV_HEADS=self.num_kv_heads,
            NUM_FIRST=num_first,
            BLOCK_P=max(32, triton.next_power_of_2(most_pages)),
            num_warps=4,
        )
