"""Draft and verify attention over encoded pages, with the interface of FlashInfer's wrappers:
plan() once for a batch shape, then run() for every layer and step.

plan() keeps the index tensors without reading them. Kernels read them on the device in every run.
A CUDA graph captured around run() therefore stays valid when indptr, indices, last_page_len,
qo_indptr and the tail's index tensors are updated in place. With `out` and `lse` given, run()
allocates nothing and does not wait for the device. Layout NHD. Log-sum-exps are to base 2, as
`flashinfer.merge_state` takes them.

    attention = DraftAttention(torch.empty(workspace_nbytes(...), dtype=torch.uint8, device="cuda"))
    attention.plan(indptr, indices, last_page_len, 32, 8, 128, 64,
                   settings=Log4Settings.for_page(64), q_dtype=torch.bfloat16)
    out, lse = attention.run(q, anchors[layer], tail=Tail(window_k[layer], window_v[layer], ...))
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import Target
from kvspec_kernels.ops.attention_plan import (
    Arithmetic,
    AttentionPlan,
    Backend,
    Records,
    Source,
    Tail,
    check_backend,
)
from kvspec_kernels.ops.cuda_attention import CudaAttention
from kvspec_kernels.ops.device import num_multiprocessors
from kvspec_kernels.ops.triton_attention import TritonAttention

__all__ = ["DraftAttention", "Tail", "VerifyAttention", "workspace_nbytes"]


class BackendAttention(Protocol):
    """Back end that is set up for one plan."""

    def __init__(self, plan: AttentionPlan, workspace: torch.Tensor) -> None: ...

    @staticmethod
    def workspace_nbytes(plan: AttentionPlan) -> int: ...

    def run(
        self,
        q: torch.Tensor,
        records: Records,
        tail: Tail | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None: ...


def _backend_class(backend: Backend, plan: AttentionPlan) -> type[BackendAttention]:
    """Return the back end for a plan. No other function chooses one. Raises ValueError if the back
    end does not cover the plan."""
    if backend == "auto":
        backend = "cuda" if CudaAttention.covers(plan) else "triton"
    if backend == "triton" and plan.arithmetic == "int8":
        raise ValueError("arithmetic 'int8' needs back end 'cuda' and a plan that 'cuda' covers")
    if backend == "triton":
        return TritonAttention
    CudaAttention.check(plan)
    return CudaAttention


def workspace_nbytes(
    *,
    batch_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    settings: CodecSpec,
    device: torch.device,
    q_dtype: torch.dtype = torch.bfloat16,
    source: Source = "anchor",
    max_qo_len: int = 1,
    num_sms: int | None = None,
    backend: Backend = "auto",
    arithmetic: Arithmetic = "auto",
    has_lists_by_head: bool = False,
    has_past: bool = True,
    deterministic_pages: int | None = None,
) -> int:
    """Return the bytes of workspace that a plan of exactly these arguments needs, for any lengths.

    source: "anchor" for DraftAttention, the target for VerifyAttention. max_qo_len: num_rows of
    DraftAttention.plan(). has_past: as there. deterministic_pages: as for VerifyAttention.plan().
    """
    index = torch.empty(batch_size + 1, dtype=torch.int32, device=device)
    plan = _make_plan(
        index,
        index.new_empty((0, num_kv_heads)) if has_lists_by_head else index,
        index[:batch_size],
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        settings=settings,
        source=source,
        q_dtype=q_dtype,
        max_qo_len=max_qo_len,
        num_sms=num_sms,
        arithmetic=arithmetic,
        has_past=has_past,
        deterministic_pages=deterministic_pages,
    )
    return _backend_class(backend, plan).workspace_nbytes(plan)


class _Attention:
    """Code that draft and verify attention share."""

    def __init__(self, workspace: torch.Tensor, backend: Backend = "auto") -> None:
        """workspace: uint8, one dimension, contiguous, at a multiple of 16 bytes. Only one run at a
        time may use it."""
        if workspace.dtype != torch.uint8 or workspace.ndim != 1 or not workspace.is_contiguous():
            raise ValueError(
                "workspace must be a contiguous uint8 tensor of one dimension, "
                f"got {workspace.dtype} of shape {list(workspace.shape)}"
            )
        if workspace.data_ptr() % 16:
            raise ValueError("workspace must start at a multiple of 16 bytes")
        self._workspace = workspace
        check_backend(backend)
        self._backend = backend
        self._plan: AttentionPlan | None = None
        self._ready: BackendAttention | None = None

    def _set_plan(self, plan: AttentionPlan) -> None:
        if plan.device != self._workspace.device:
            raise ValueError(
                f"indptr must be on {self._workspace.device}, like the workspace, got {plan.device}"
            )
        chosen = _backend_class(self._backend, plan)
        needed = chosen.workspace_nbytes(plan)
        if len(self._workspace) < needed:
            raise ValueError(
                f"workspace must have at least {needed} bytes, got {len(self._workspace)}"
            )
        self._plan = plan
        self._ready = chosen(plan, self._workspace)

    def _run(
        self,
        q: torch.Tensor,
        records: Records,
        tail: Tail | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._plan is None or self._ready is None:
            raise RuntimeError("run() was called before plan()")
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self._plan.check_run(q, records, tail, out, lse)
        if len(q):
            self._ready.run(q, records, tail, out, lse)
        return out, lse


class DraftAttention(_Attention):
    """Attention of one or a few query tokens a request over anchors and, if given, a full-precision
    tail. The query tokens are the tail's last tokens, and attention among them is causal."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        settings: CodecSpec,
        q_dtype: torch.dtype,
        sm_scale: float | None = None,
        num_sms: int | None = None,
        arithmetic: Arithmetic = "auto",
        num_rows: int = 1,
        has_past: bool = True,
    ) -> None:
        """Set batch and model. Request b's past is pages indices[indptr[b] : indptr[b + 1]], the
        last filled up to last_page_len[b]. A request without pages has no past.

        indptr [batch_size + 1], indices and last_page_len [batch_size]: int32, contiguous. If KV
        heads read different pages, indices are [num_indices, num_kv_heads], with heads contiguous
        and -1 behind the pages of a head that has fewer.
        q_dtype: bf16, fp16 or fp32, also the KV dtype of a tail. sm_scale: 1 / sqrt(head_dim)
        unless given. num_sms: multiprocessors to fill, by default all of the device.
        arithmetic: number format of products over pages, "fp16" or "int8" (integer draft attention:
        HACK, section 4). Only the CUDA back end has "int8".
        num_rows: query tokens of each request. All read the whole past, which is read once for as
        many of them as registers hold (kernels/README.md). Token r of a request sees the tail but
        for its last num_rows - 1 - r tokens. A request with fewer new tokens has them in its last
        rows. Its first rows then see earlier tokens only, and their results mean nothing.
        has_past: False if no request ever has pages, as attention to the tail alone has not. It
        chooses a kernel, and changes no semantics.
        """
        self._set_plan(
            _make_plan(
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                settings=settings,
                source="anchor",
                q_dtype=q_dtype,
                sm_scale=sm_scale,
                num_sms=num_sms,
                max_qo_len=num_rows,
                arithmetic=arithmetic,
                has_past=has_past,
            )
        )

    def run(
        self,
        q: torch.Tensor,
        anchors: torch.Tensor,
        tail: Tail | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from q [batch_size * num_rows, num_qo_heads, head_dim] to anchors
        [num_pages, num_kv_heads, nbytes] uint8. Returns (out like q, lse
        [batch_size * num_rows, num_qo_heads] fp32). Every value of `out` and `lse` is written: 0
        and -inf for a query that sees no token.
        """
        return self._run(q, Records(anchors=anchors), tail, out, lse)


class VerifyAttention(_Attention):
    """Attention of several query tokens a request over pages at the target precision.

    If a tail is given, the query tokens are its last tokens, and attention in it is causal.
    """

    def plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        settings: CodecSpec,
        target: Target,
        q_dtype: torch.dtype,
        max_qo_len: int,
        kv_dtype: torch.dtype | None = None,
        sm_scale: float | None = None,
        num_sms: int | None = None,
        may_join_separately: bool = True,
        expected_batch: int | None = None,
        deterministic_pages: int | None = None,
    ) -> None:
        """Set batch and model; see DraftAttention.plan for the other arguments.

        qo_indptr: [batch_size + 1] int32; request b has query tokens qo_indptr[b] ..
        qo_indptr[b + 1], at most max_qo_len. kv_dtype must be q_dtype, its default.
        may_join_separately: False if batch sizes vary and a new size must not compile a kernel.
        expected_batch: likely number of requests of a run, by default batch_size; affects speed.
        deterministic_pages: most pages of all requests of a run together, past and tail. If given,
        the bits of a row depend only on its query and on the KV that it sees: all plans of one
        model, codec and back end agree.
        """
        if kv_dtype not in (None, q_dtype):
            raise ValueError(f"kv_dtype must be {q_dtype}, like q_dtype, got {kv_dtype}")
        if target not in ("exact", "int8"):
            raise ValueError(f"target must be exact or int8, got {target!r}")
        self._set_plan(
            _make_plan(
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                settings=settings,
                source=target,
                q_dtype=q_dtype,
                sm_scale=sm_scale,
                num_sms=num_sms,
                qo_indptr=qo_indptr,
                max_qo_len=max_qo_len,
                may_join_separately=may_join_separately,
                expected_batch=expected_batch,
                deterministic_pages=deterministic_pages,
            )
        )

    def run(
        self,
        q: torch.Tensor,
        anchors: torch.Tensor | None,
        residuals: torch.Tensor,
        residual_slots: torch.Tensor,
        tail: Tail | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from q [num_tokens, num_qo_heads, head_dim]. Returns (out like q, lse
        [num_tokens, num_qo_heads] fp32).

        anchors: [num_pages, num_kv_heads, nbytes] uint8, unused for the exact target. residuals:
        [num_slots, num_kv_heads, nbytes] uint8, page i's at residual_slots[i] (int32
        [num_pages]). Tokens from qo_indptr[-1] on belong to no request and get 0 and -inf.
        """
        records = Records(anchors, residuals, residual_slots)
        return self._run(q, records, tail, out, lse)


def _make_plan(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    settings: CodecSpec,
    source: Source,
    q_dtype: torch.dtype,
    sm_scale: float | None = None,
    num_sms: int | None = None,
    qo_indptr: torch.Tensor | None = None,
    max_qo_len: int = 1,
    arithmetic: Arithmetic = "auto",
    may_join_separately: bool = True,
    expected_batch: int | None = None,
    has_past: bool = True,
    deterministic_pages: int | None = None,
) -> AttentionPlan:
    device = indptr.device
    if num_sms is None:
        num_sms = num_multiprocessors(device)
    return AttentionPlan(
        indptr=indptr,
        indices=indices,
        last_page_len=last_page_len,
        qo_indptr=qo_indptr,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        settings=settings,
        source=source,
        q_dtype=q_dtype,
        sm_scale=1 / math.sqrt(head_dim) if sm_scale is None else sm_scale,
        max_qo_len=max_qo_len,
        num_sms=num_sms,
        arithmetic=arithmetic,
        may_join_separately=may_join_separately,
        expected_batch=expected_batch,
        has_past=has_past,
        deterministic_pages=deterministic_pages,
    )
