"""FlashInfer on the same shapes: paged decode, and paged prefill of a few new tokens."""

from __future__ import annotations

from collections.abc import Callable

import flashinfer
import torch

from attention.shapes import HEAD_DIM, KV_HEADS, PAGE_SIZE, QO_HEADS, Shape

WORKSPACE_BYTES = 512 * 2**20


def kv_pages(num_pages: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random pages [num_pages, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM], filled part by part so
    that temporary tensors stay small."""
    shape = (PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pages = torch.empty((num_pages, 2, *shape), dtype=dtype, device="cuda")
    step = 2048
    for first in range(0, num_pages, step):
        part = pages[first : first + step]
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device="cuda"))
    return pages


def decode_calls(shape: Shape, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Return decode calls as SGLang makes them, with tensor cores. Plans are made here, so they are
    not timed."""
    copies = shape.rotations(shape.values() * dtype.itemsize)
    indptr, lists, last = shape.page_tables(copies)
    pages = kv_pages(shape.num_pages * copies, dtype)
    q = torch.randn(shape.batch, QO_HEADS, HEAD_DIM, device="cuda").bfloat16()
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def call_on(indices: torch.Tensor) -> Callable[[], object]:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_tensor_cores=True,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=torch.empty_like(indptr),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(last),
        )
        heads = (QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        wrapper.plan(indptr, indices, last, *heads, q_data_type=torch.bfloat16, kv_data_type=dtype)
        return lambda: wrapper.run(q, pages)

    return [call_on(indices) for indices in lists]


def append_calls(shape: Shape, num_new: int, backend: str) -> list[Callable[[], object]]:
    """Return calls of causal attention: the newest `num_new` tokens of each request attend to all
    BF16 KV of the request. The plan fits these lengths only.

    backend: "fa2" splits long KV over multiprocessors. "fa3" does not; FlashInfer selects it by
    default on Hopper.
    """
    copies = shape.rotations(shape.values() * 2)
    indptr, lists, last = shape.page_tables(copies)
    pages = kv_pages(shape.num_pages * copies, torch.bfloat16)
    q = torch.randn(shape.batch * num_new, QO_HEADS, HEAD_DIM, device="cuda").bfloat16()
    qo_indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * num_new
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def call_on(indices: torch.Tensor) -> Callable[[], object]:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        heads = (QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        wrapper.plan(
            qo_indptr, indptr, indices, last, *heads, causal=True, q_data_type=torch.bfloat16
        )
        return lambda: wrapper.run(q, pages)

    return [call_on(indices) for indices in lists]
