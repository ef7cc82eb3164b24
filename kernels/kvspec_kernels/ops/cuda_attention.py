"""The Hopper back end: CUDA kernels over encoded pages, and the tail through Triton."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from kvspec_kernels.jit.cuda_attention import DraftShape, draft_kernel, supported
from kvspec_kernels.jit.merge_states import merge_states_kernel
from kvspec_kernels.ops.attention_plan import AttentionPlan, Records, Tail
from kvspec_kernels.ops.triton_attention import TritonAttention

ALIGNMENT = 256


class CudaAttention:
    """Runs a plan. `workspace` holds counters and partial states of the CUDA kernel and, for runs
    with a tail, the states of past and tail before they are joined."""

    def __init__(self, plan: AttentionPlan, workspace: torch.Tensor) -> None:
        if not self.covers(plan):
            raise ValueError(
                "backend 'cuda' needs a device of compute capability 9.0, drafting over anchors "
                "with log4's linear levels or uniform4, bf16 or fp16, and a head size of 64, 96, "
                "128 or 256"
            )
        self._plan = plan
        self._kernel = draft_kernel(_shape(plan), plan.device)
        sizes = self._sizes(plan)
        parts = iter(torch.split(workspace[: sum(sizes)], sizes))
        self._scratch = next(parts)
        # The kernel leaves its counters as it finds them.
        self._scratch[: self._kernel.counter_bytes(plan.batch_size)].zero_()
        states = [next(parts) for _ in range(4)]
        heads = (plan.batch_size, plan.num_qo_heads)
        self._outs = [
            part.view(plan.q_dtype)[: heads[0] * heads[1] * plan.head_dim].view(
                *heads, plan.head_dim
            )
            for part in states[:2]
        ]
        self._lses = [
            part.view(torch.float32)[: heads[0] * heads[1]].view(heads) for part in states[2:]
        ]
        empty = next(parts)
        self._tail = TritonAttention(_without_past(plan, empty), next(parts))

    @staticmethod
    def covers(plan: AttentionPlan) -> bool:
        """Whether the CUDA kernels can run this plan."""
        return (
            plan.source == "anchor"
            and plan.device.type == "cuda"
            and supported(_shape(plan), plan.device)
        )

    @classmethod
    def workspace_nbytes(cls, plan: AttentionPlan) -> int:
        return sum(cls._sizes(plan))

    @staticmethod
    def _sizes(plan: AttentionPlan) -> list[int]:
        """Bytes of: kernel scratch, two outputs, two lses, an empty past, the tail's scratch."""
        rows = plan.batch_size * plan.num_qo_heads
        sizes = [
            draft_kernel(_shape(plan), plan.device).workspace_bytes(plan.batch_size),
            *[rows * plan.head_dim * plan.q_dtype.itemsize] * 2,
            *[rows * 4] * 2,
            4 * (plan.batch_size + 1),
            TritonAttention.workspace_nbytes(plan),
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
        plan = self._plan
        assert records.anchors is not None
        direct = tail is None and out.is_contiguous() and lse.is_contiguous()
        past_out, past_lse = (out, lse) if direct else (self._outs[0], self._lses[0])
        self._kernel.run(
            q,
            records.anchors,
            plan.indptr,
            plan.indices,
            plan.last_page_len,
            plan.sm_scale,
            self._scratch,
            past_out,
            past_lse,
        )
        if tail is not None:
            tail_out, tail_lse = self._outs[1], self._lses[1]
            self._tail.run(q, records, tail, tail_out, tail_lse)
            merge_states_kernel[(len(q), plan.num_qo_heads)](
                past_out,
                past_lse,
                tail_out,
                tail_lse,
                out,
                lse,
                out.stride(0),
                out.stride(1),
                lse.stride(0),
                lse.stride(1),
                NUM_HEADS=plan.num_qo_heads,
                HEAD_DIM=plan.head_dim,
                BLOCK_D=triton.next_power_of_2(plan.head_dim),
                num_warps=1,
            )
        elif not direct:
            out.copy_(past_out)
            lse.copy_(past_lse)


def _shape(plan: AttentionPlan) -> DraftShape:
    return DraftShape(
        plan.settings,
        plan.page_size,
        plan.head_dim,
        plan.num_qo_heads,
        plan.num_kv_heads,
        plan.q_dtype,
    )


def _without_past(plan: AttentionPlan, workspace: torch.Tensor) -> AttentionPlan:
    """The plan with no page for any request; `workspace` becomes its indptr."""
    workspace.zero_()
    indptr = workspace.view(torch.int32)[: plan.batch_size + 1]
    return replace(plan, indptr=indptr, last_page_len=indptr[: plan.batch_size])
