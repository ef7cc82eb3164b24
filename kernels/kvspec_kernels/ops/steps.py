"""Work of a captured decode step before and after the model, in three launches."""

from __future__ import annotations

import torch
import triton

from kvspec_kernels.jit.steps import argmax_kernel, begin_step_kernel, end_step_kernel

# Parts of a row's logits, one for each program, and the least number of logits of a part.
LOGIT_PARTS, LEAST_LOGITS = 32, 1024
# Logits, and rows, that a program takes at a time.
MOST_LOGITS, MOST_ROWS = 4096, 64


def begin_step(
    tail_indptr: torch.Tensor,
    tail_slots: torch.Tensor,
    tail_lens: torch.Tensor,
    limits: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    page_size: int,
) -> None:
    """Make room for one more token in each tail that is shorter than its row's limit. slots and
    offsets become the token's place, and tail_lens grow by one. Other rows get the slot -1.

    tail_indptr [batch + 1], tail_slots [any], tail_lens, limits, slots, offsets [batch]: int32,
    contiguous, on one device. The tail of row b is pages tail_slots[tail_indptr[b] :]. Writes
    slots, offsets and tail_lens in place. Does not wait for the device, and allocates nothing.
    """
    batch = len(tail_lens)
    if batch == 0:
        return
    block = min(triton.next_power_of_2(batch), MOST_ROWS)
    begin_step_kernel[(triton.cdiv(batch, block),)](
        tail_indptr,
        tail_slots,
        tail_lens,
        limits,
        slots,
        offsets,
        batch,
        len(tail_slots),
        PAGE_SIZE=page_size,
        BLOCK_B=block,
        num_warps=1,
    )


class StepEnd:
    """End of a step of up to max_batch rows, with buffers whose addresses never change."""

    def __init__(self, max_batch: int, device: torch.device) -> None:
        shape = (max_batch, LOGIT_PARTS)
        self._values = torch.zeros(shape, dtype=torch.float32, device=device)
        self._indices = torch.zeros(shape, dtype=torch.int32, device=device)

    def __call__(
        self,
        logits: torch.Tensor,
        tail_lens: torch.Tensor,
        limits: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        drafts: torch.Tensor,
        step: torch.Tensor,
    ) -> None:
        """Write each row's most likely token, the first of a tie, to drafts[step] and input_ids.
        Advance the positions of rows below their limits, and add one to step.

        logits: [batch, vocab] of any floating dtype, rows contiguous; NaN counts as infinite.
        tail_lens, limits: [batch] int32. input_ids, positions: [batch] int64. drafts: [max_steps,
        at least batch] int64; steps from max_steps on are not written. step: [1] int64. Writes
        input_ids, positions, drafts and step in place. Does not wait for the device, and allocates
        nothing.
        """
        batch, vocab = logits.shape
        if batch == 0:
            step += 1
            return
        assert logits.stride(1) == 1, "rows of logits must be contiguous"
        parts = min(triton.next_power_of_2(triton.cdiv(vocab, LEAST_LOGITS)), LOGIT_PARTS)
        part = triton.cdiv(vocab, parts)
        argmax_kernel[(batch, parts)](
            logits,
            self._values,
            self._indices,
            logits.stride(0),
            vocab,
            part,
            BLOCK=min(triton.next_power_of_2(part), MOST_LOGITS),
            num_warps=4,
        )
        block = min(triton.next_power_of_2(batch), MOST_ROWS)
        end_step_kernel[(1,)](
            self._values,
            self._indices,
            tail_lens,
            limits,
            input_ids,
            positions,
            drafts,
            step,
            drafts.stride(0),
            batch,
            len(drafts),
            PARTS=parts,
            BLOCK_B=block,
            num_warps=4,
        )
