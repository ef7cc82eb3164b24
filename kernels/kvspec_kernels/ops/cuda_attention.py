"""The Hopper back end: CUDA kernels over encoded pages and the tail."""

from __future__ import annotations

import math

import torch

from kvspec_kernels.codecs.kernels import Arithmetic
from kvspec_kernels.jit.cuda_attention import (
    AttentionShape,
    DraftKernel,
    State,
    arithmetics,
    draft_kernel,
    draft_supported,
)
from kvspec_kernels.jit.cuda_verify import (
    VerifyKernel,
    tail_aligned,
    verify_kernel,
    verify_supported,
)
from kvspec_kernels.ops.attention_plan import AttentionPlan, Records, Tail

ALIGNMENT = 256


class CudaAttention:
    """Back end of one plan, which it covers. `workspace` holds counters and partial states of the
    CUDA kernel and, for drafts, the states of past and tail before they are joined."""

    def __init__(self, plan: AttentionPlan, workspace: torch.Tensor) -> None:
        self._plan = plan
        self._kernel = _kernel(plan)
        sizes = self._sizes(plan)
        scratch, *states = torch.split(workspace[: sum(sizes)], sizes)
        self._scratch = scratch
        # Drafts have states of past and tail, to be joined. The last state is for results whose
        # out or lse is not contiguous.
        half = len(states) // 2
        self._outs = [part.view(plan.q_dtype) for part in states[:half]]
        self._lses = [part.view(torch.float32) for part in states[half:]]
        if isinstance(self._kernel, VerifyKernel):
            # The kernel needs zeroed counters, and leaves them zeroed.
            scratch[: self._kernel.counter_bytes(plan.batch_size)].zero_()

    @staticmethod
    def covers(plan: AttentionPlan) -> bool:
        """Return True if the CUDA kernels can run this plan."""
        if plan.source == "anchor":
            return draft_supported(_shape(plan), plan.device)
        return plan.source == "int8" and verify_supported(
            _shape(plan), plan.device, plan.batch_size
        )

    @classmethod
    def check(cls, plan: AttentionPlan) -> None:
        """Raise ValueError unless the CUDA kernels can run this plan."""
        if not cls.covers(plan):
            raise ValueError(
                "backend 'cuda' needs a device of compute capability 9.0, bf16 or fp16, a head "
                "size of 64, 96, 128 or 256, and uniform4 or log4 with linear levels. Drafts also "
                "need arithmetic int8 for 2-bit anchors, and fp16 for 4-bit anchors of log4. "
                "Verifications also need target int8, page and head sizes in multiples of 64, and "
                "alpha 0 for log4"
            )

    @classmethod
    def workspace_nbytes(cls, plan: AttentionPlan) -> int:
        return sum(cls._sizes(plan))

    @staticmethod
    def _sizes(plan: AttentionPlan) -> list[int]:
        """Return the bytes of: kernel scratch, outputs, and as many lses. The last of each is used
        only if the caller's out or lse is not contiguous."""
        rows = plan.batch_size * plan.max_qo_len * plan.num_qo_heads
        out, lse = rows * plan.head_dim * plan.q_dtype.itemsize, rows * 4
        is_draft = plan.source == "anchor"
        num_states = 3 if is_draft else 1
        kernel = _kernel(plan)
        if isinstance(kernel, VerifyKernel):
            scratch = kernel.workspace_bytes(plan.batch_size, plan.deterministic_pages or 0)
        else:
            scratch = kernel.workspace_bytes(plan.batch_size)
        sizes = [
            scratch,
            *[out] * num_states,
            *[lse] * num_states,
        ]
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]

    def run(
        self,
        q: torch.Tensor,
        records: Records,
        tail: Tail | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write `out` and `lse`; the arguments were checked against the plan."""
        rows = self._plan.batch_size * self._plan.max_qo_len
        if len(q) > rows:
            # Tokens past `rows` cannot belong to a request.
            out[rows:].zero_()
            lse[rows:].fill_(-math.inf)
            q, out, lse = q[:rows], out[:rows], lse[:rows]
        is_whole = out.is_contiguous() and lse.is_contiguous()
        target = (out, lse) if is_whole else self._state(-1, q)
        if isinstance(self._kernel, DraftKernel):
            self._draft(self._kernel, q, records, tail, target)
        else:
            self._verify(self._kernel, q, records, tail, target)
        if not is_whole:
            out.copy_(target[0])
            lse.copy_(target[1])

    def _state(self, index: int, q: torch.Tensor) -> State:
        """Return an output like q, and its lse, in the workspace."""
        rows = len(q) * self._plan.num_qo_heads
        out = self._outs[index][: rows * self._plan.head_dim].view(q.shape)
        return out, self._lses[index][:rows].view(q.shape[:2])

    def _draft(
        self, kernel: DraftKernel, q: torch.Tensor, records: Records, tail: Tail | None, out: State
    ) -> None:
        plan = self._plan
        assert records.anchors is not None
        past, recent = self._state(0, q), self._state(1, q)
        kernel.attend(
            q,
            records.anchors,
            plan.indptr,
            plan.indices,
            plan.last_page_len,
            tail,
            plan.sm_scale,
            self._scratch,
            past,
            recent,
        )
        kernel.join(plan.indptr, self._scratch, past, None if tail is None else recent, out)

    def _verify(
        self, kernel: VerifyKernel, q: torch.Tensor, records: Records, tail: Tail | None, out: State
    ) -> None:
        """Attend to pages and the tail."""
        plan = self._plan
        assert records.anchors is not None
        assert records.residuals is not None
        assert records.residual_slots is not None
        assert plan.qo_indptr is not None
        if tail is not None and not tail_aligned(tail.window_k):
            raise ValueError(
                "tail.window_k must have a start and strides at multiples of 4 bytes, "
                f"got strides {tail.window_k.stride()}"
            )
        pages = (records.anchors, records.residuals, records.residual_slots)
        index = (plan.qo_indptr, plan.indptr, plan.indices, plan.last_page_len)
        most = plan.deterministic_pages or 0
        kernel.run(q, *pages, *index, tail, plan.sm_scale, most, self._scratch, *out)


def _shape(plan: AttentionPlan) -> AttentionShape:
    return AttentionShape(
        plan.settings,
        plan.page_size,
        plan.head_dim,
        plan.num_qo_heads,
        plan.num_kv_heads,
        plan.q_dtype,
        _arithmetic(plan),
        plan.has_lists_by_head,
        plan.max_qo_len if plan.source == "anchor" else 1,
    )


def _arithmetic(plan: AttentionPlan) -> Arithmetic:
    """Return the number format of the plan, or for "auto" the faster one (kernels/README.md)."""
    if plan.source != "anchor":
        return "fp16"
    if plan.arithmetic != "auto":
        return plan.arithmetic
    # A query row takes two of a product's eight columns in int8, and one in fp16.
    prefers_int8 = plan.group <= 4 and plan.head_dim >= 128 and plan.max_qo_len == 1
    # arithmetics() is empty if the back end does not cover the codec's parameters.
    possible = arithmetics(plan.settings) or ("fp16",)
    return possible[-1 if prefers_int8 else 0]


def _kernel(plan: AttentionPlan) -> DraftKernel | VerifyKernel:
    if plan.source == "anchor":
        return draft_kernel(_shape(plan), plan.batch_size, plan.device)
    sizes = (plan.max_qo_len, plan.expected_batch or plan.batch_size)
    return verify_kernel(
        _shape(plan),
        *sizes,
        plan.device,
        may_join_separately=plan.may_join_separately,
        is_deterministic=plan.deterministic_pages is not None,
    )
