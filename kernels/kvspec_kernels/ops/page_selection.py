"""Scores of requests' pages by the queries of verified tokens, and selection of the pages that
drafts read. Everything stays on the device: lists of pages go to fixed memory that captured draft
steps read."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import anchor_layout
from kvspec_kernels.jit.cuda_attention import AttentionShape
from kvspec_kernels.jit.cuda_scores import ScoreKernel, score_kernel, scores_supported
from kvspec_kernels.jit.functions import kernel_function
from kvspec_kernels.jit.page_selection import (
    mean_unread_kernel,
    page_lse_kernel,
    page_mass_kernel,
    select_kernel,
)
from kvspec_kernels.ops.attention_plan import Backend, check_backend, check_index, check_tensor
from kvspec_kernels.ops.triton_attention import INTERPRETED, TRITON_DTYPES
from kvspec_kernels.reference.codec import kernel_reference_of

# Parts of a request's pages that are scored by programs of their own.
NUM_SPLITS = 32
# Values of log-sum-exps that a program of the mass kernel loads at a time.
MASS_TILE = 4096


class ScoredRequests(NamedTuple):
    """Index tensors of requests whose pages are scored, all int32.

    Request b has the encoded, full pages indices[indptr[b] : indptr[b + 1]], and the queries from
    q_begin[b] on, num_queries[b] of them. slots[b]: where its mass is kept. num_known[b]: how many
    of its first pages have a mass there. A request without pages or queries is skipped. indptr:
    [max_batch + 1]; the others but indices: [max_batch].
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    q_begin: torch.Tensor
    num_queries: torch.Tensor
    slots: torch.Tensor
    num_known: torch.Tensor


class SelectedLists(NamedTuple):
    """Index tensors of requests for which pages are selected, all int32.

    Request b has pages indices[indptr[b] : indptr[b + 1]], whose mass is in slots[b]. Its list is
    [out_indptr[b], out_indptr[b + 1]), and the last num_last[b] pages are in any case on it.
    indptr, out_indptr: [max_batch + 1]; slots, num_last: [max_batch].
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    slots: torch.Tensor
    out_indptr: torch.Tensor
    num_last: torch.Tensor


class PageSelection:
    """Attention mass of the pages of up to num_slots requests, in memory whose addresses never
    change, and selection by it.

    mass: [num_layers, num_slots, num_kv_heads, most_pages] fp32. unread: mass of the pages that the
    newest select() did not choose, the mean of all layers and KV heads: [num_slots] fp32 on the
    CPU, which the device writes. score() is called for each layer, then select(). Neither allocates
    nor waits for the device, and both read index tensors on the device, so that CUDA graphs may
    hold them.
    """

    def __init__(
        self,
        max_batch: int,
        max_scored: int,
        num_slots: int,
        most_pages: int,
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
        backend: Backend = "auto",
    ) -> None:
        """max_batch: requests of a call. max_scored: pages that a call of score() has in all.
        most_pages, most_queries: of a request. sm_scale: 1 / sqrt(head_dim) unless given. backend:
        of score(). Raises ValueError for a back end that does not exist or does not cover these
        sizes."""
        check_backend(backend)
        self.max_batch, self.num_kv_heads = max_batch, num_kv_heads
        self.q_shape = (None, num_qo_heads, head_dim)
        self.q_dtype, self.device = q_dtype, device
        group = num_qo_heads // num_kv_heads
        num_rows = most_queries * group
        self._lse = torch.empty(
            (max_scored, num_kv_heads, num_rows), dtype=torch.float32, device=device
        )
        shape = (num_layers, num_slots, num_kv_heads, most_pages)
        self.mass = torch.zeros(shape, dtype=torch.float32, device=device)
        # A copy of few bytes would wait in the copy engine, behind pages: the kernel writes here.
        self.unread = torch.zeros(
            num_slots, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda"
        )
        self._unread = self.mass.new_zeros((max_batch, num_layers, num_kv_heads))
        self._sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        heads = (num_qo_heads, num_kv_heads)
        shape_of_kernel = AttentionShape(settings, page_size, head_dim, *heads, q_dtype)
        self._kernel: ScoreKernel | None = None
        if backend != "triton" and scores_supported(shape_of_kernel, device):
            self._kernel = score_kernel(shape_of_kernel, most_queries, device)
        elif backend == "cuda":
            raise ValueError(
                "backend 'cuda' needs a device of compute capability 9.0, bf16 or fp16, a head "
                "size of 64, 96, 128 or 256, and uniform4 or log4 with linear levels"
            )
        block_m = max(16, triton.next_power_of_2(num_rows))
        layout, decode = (
            anchor_layout(settings, page_size, head_dim),
            settings.triton_decode(page_size),
        )
        self._shared = {"NUM_KV_HEADS": num_kv_heads, "GROUP": group, "NUM_ROWS": num_rows}
        self._keys = {
            "table_ptr": kernel_reference_of(settings).code_values(
                settings, head_dim, device, refined=False
            ),
            "scale_log2": self._sm_scale * math.log2(math.e),
            "DECODE": kernel_function(decode.function),
            "ROTATES": decode.rotates,
            "ANCHOR_BITS": settings.anchor_bits,
            "PAGE_SIZE": page_size,
            "HEAD_DIM": head_dim,
            "K_CHUNK": decode.chunks[0],
            "K_CODES": layout["k_codes"].offset,
            "K_OFFSET": layout[f"k_{decode.offset}"].offset,
            "K_SCALE": layout[f"k_{decode.scale}"].offset,
            "DTYPE": TRITON_DTYPES[q_dtype],
            "FINITE_MAX": torch.finfo(q_dtype).max,
            "INTERPRET": INTERPRETED,
            "NUM_SPLITS": NUM_SPLITS,
            "BLOCK_M": block_m,
            "BLOCK_N": 64 if page_size % 64 == 0 and head_dim <= 128 else 32,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        }
        # Keys of 256 channels fit the registers of 8 warps, and 32 of them 99 KiB of shared memory.
        self._lse_warps = 8 if head_dim > 128 else 4
        self._mass = {"BLOCK_M": block_m, "BLOCK_P": max(1, MASS_TILE // block_m)}
        self._select = {"BLOCK_P": triton.next_power_of_2(most_pages)}
        self._nbytes = layout.nbytes

    def score(
        self, layer: int, q: torch.Tensor, anchors: torch.Tensor, requests: ScoredRequests
    ) -> None:
        """Update mass[layer] of the pages of some requests.

        A full set of most_queries queries sets the mass. Fewer queries change it by as large a
        share, so that it stays about that of the last most_queries queries.

        q: [num_tokens, num_qo_heads, head_dim]. anchors: [num_pages, num_kv_heads, nbytes] uint8 of
        the layer. Raises ValueError for other shapes.
        """
        check_tensor("q", q, self.q_shape, self.q_dtype, self.device)
        record = (None, self.num_kv_heads, self._nbytes)
        check_tensor("anchors", anchors, record, torch.uint8, self.device)
        self._check(requests, "indptr")
        if self._kernel is None:
            self._score_pages(q, anchors, requests)
        else:
            self._kernel.score(q, anchors, *requests[:4], self._sm_scale, self._lse)
        mass = self.mass[layer]
        page_mass_kernel[(self.max_batch, self.num_kv_heads)](
            lse_ptr=self._lse,
            indptr_ptr=requests.indptr,
            num_queries_ptr=requests.num_queries,
            slots_ptr=requests.slots,
            num_known_ptr=requests.num_known,
            mass_ptr=mass,
            stride_mass_slot=mass.stride(0),
            stride_mass_head=mass.stride(1),
            **self._shared,
            **self._mass,
            num_warps=4,
        )

    def _score_pages(
        self, q: torch.Tensor, anchors: torch.Tensor, requests: ScoredRequests
    ) -> None:
        """Write the log-sum-exps of all pages, by the portable kernel."""
        page_lse_kernel[(self.max_batch, NUM_SPLITS, self.num_kv_heads)](
            q_ptr=q,
            anchors_ptr=anchors,
            indptr_ptr=requests.indptr,
            indices_ptr=requests.indices,
            q_begin_ptr=requests.q_begin,
            num_queries_ptr=requests.num_queries,
            lse_ptr=self._lse,
            stride_q_token=q.stride(0),
            stride_q_head=q.stride(1),
            stride_anchor_page=anchors.stride(0),
            stride_anchor_head=anchors.stride(1),
            **self._shared,
            **self._keys,
            num_warps=self._lse_warps,
            num_stages=1,
        )

    def select(self, lists: SelectedLists, out: torch.Tensor, *, num_first: int) -> None:
        """Write the selected pages of each request, in order, to its list in `out` [num_out,
        num_layers, num_kv_heads] int32, and `unread` of requests with a list. If a list is longer
        than the request has pages, -1 follows them. num_first: first pages that are on every
        list."""
        num_layers = len(self.mass)
        shape = (None, num_layers, self.num_kv_heads)
        check_tensor("out", out, shape, torch.int32, self.device)
        self._check(lists, "indptr", "out_indptr")
        select_kernel[(self.max_batch, self.num_kv_heads, num_layers)](
            mass_ptr=self.mass,
            indptr_ptr=lists.indptr,
            indices_ptr=lists.indices,
            slots_ptr=lists.slots,
            out_ptr=out,
            out_indptr_ptr=lists.out_indptr,
            num_last_ptr=lists.num_last,
            unread_ptr=self._unread,
            stride_mass_layer=self.mass.stride(0),
            stride_mass_slot=self.mass.stride(1),
            stride_mass_head=self.mass.stride(2),
            stride_out_index=out.stride(0),
            stride_out_layer=out.stride(1),
            NUM_FIRST=num_first,
            **self._select,
            num_warps=4,
        )
        num_lists = num_layers * self.num_kv_heads
        mean_unread_kernel[(self.max_batch,)](
            unread_ptr=self._unread,
            slots_ptr=lists.slots,
            out_indptr_ptr=lists.out_indptr,
            mean_ptr=self.unread,
            NUM_LISTS=num_lists,
            BLOCK=triton.next_power_of_2(num_lists),
            num_warps=4,
        )

    def _check(self, index: ScoredRequests | SelectedLists, *ends: str) -> None:
        """Raise ValueError unless the tensors fit; those named in `ends` have an entry more."""
        for name, tensor in index._asdict().items():
            size = None if name == "indices" else self.max_batch + (name in ends)
            check_index(name, tensor, self.device, size)
