"""Plans of KVSpec's kernel over records at the target precision, for steps, forwards and captured
verifications."""

from __future__ import annotations

import torch

from kvspec_kernels.jit.cuda_attention import AttentionShape
from kvspec_kernels.jit.cuda_verify import verify_supported
from kvspec_kernels.ops.attention import VerifyAttention, workspace_nbytes
from kvspec_kernels.ops.attention_plan import Backend
from sglang_kvspec.kv.gpu_cache import GpuKVCache

# Most requests, or parts of requests, in one call of the kernel.
PARTS_OF_A_CALL = 64


def heads_of(kv: GpuKVCache, num_qo_heads: int) -> tuple[int, int, int, int]:
    """Return query heads, KV heads, head size and page size, as plans take them."""
    geometry = kv.geometry
    return num_qo_heads, geometry.num_kv_heads, geometry.head_dim, geometry.page_size


def _backend_of(kv: GpuKVCache) -> Backend:
    """Return the back end of attention at the target precision. Only Triton reads exact records."""
    return kv.kernels if kv.codec.target == "int8" else "triton"


def verifies_in_cuda(kv: GpuKVCache, num_qo_heads: int) -> bool:
    """Return True if the CUDA kernel reads the records of an `int8` target."""
    heads, geometry = heads_of(kv, num_qo_heads), kv.geometry
    shape = AttentionShape(kv.codec.settings, heads[3], heads[2], *heads[:2], geometry.dtype)
    return kv.kernels != "triton" and verify_supported(shape, kv.device, PARTS_OF_A_CALL)


def target_workspace_nbytes(
    kv: GpuKVCache,
    num_qo_heads: int,
    num_parts: int,
    max_qo_len: int,
    deterministic_pages: int | None = None,
) -> int:
    """Return the bytes of workspace that a plan needs for num_parts requests, or parts of requests,
    with up to max_qo_len tokens each. deterministic_pages: as for VerifyAttention.plan()."""
    heads = heads_of(kv, num_qo_heads)
    return workspace_nbytes(
        batch_size=num_parts,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        page_size=heads[3],
        settings=kv.codec.settings,
        device=kv.device,
        q_dtype=kv.geometry.dtype,
        source=kv.codec.target,  # type: ignore[arg-type]
        max_qo_len=max_qo_len,
        backend=_backend_of(kv),
        deterministic_pages=deterministic_pages,
    )


def planned_target(
    kv: GpuKVCache,
    num_qo_heads: int,
    workspace: torch.Tensor,
    qo_indptr: torch.Tensor,
    past_indptr: torch.Tensor,
    past_pages: torch.Tensor,
    past_last: torch.Tensor,
    max_qo_len: int,
    *,
    is_captured: bool = True,
    num_likely: int | None = None,
    deterministic_pages: int | None = None,
) -> VerifyAttention:
    """Plan the kernel over requests, or parts of requests. Every run reads the index tensors, which
    are those of VerifyAttention.plan(), as is deterministic_pages.

    is_captured: the plan is for a graph, so its kernels are compiled before anything is served.
    num_likely: parts that a run is likely to have; None for all that there is room for.
    """
    attention = VerifyAttention(workspace, _backend_of(kv))
    attention.plan(
        qo_indptr,
        past_indptr,
        past_pages,
        past_last,
        *heads_of(kv, num_qo_heads),
        settings=kv.codec.settings,
        target=kv.codec.target,  # type: ignore[arg-type]
        q_dtype=kv.geometry.dtype,
        max_qo_len=max_qo_len,
        may_join_separately=is_captured,
        expected_batch=num_likely,
        deterministic_pages=deterministic_pages,
    )
    return attention
