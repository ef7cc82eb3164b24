"""Triton kernels of ops/steps.py, before and after the model in a captured decode step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch", "num_tail_slots"])
def begin_step_kernel(
    tail_indptr_ptr,
    tail_slots_ptr,
    tail_lens_ptr,
    limits_ptr,
    slots_ptr,
    offsets_ptr,
    batch,
    num_tail_slots,
    PAGE_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Run ops/steps.py's begin_step(). Grid: programs of BLOCK_B rows each."""
    row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = row < batch
    length = tl.load(tail_lens_ptr + row, mask=mask, other=0)
    grows = mask & (length < tl.load(limits_ptr + row, mask=mask, other=0))
    # A full tail points past its own slots, perhaps past the slots of all tails.
    place = tl.load(tail_indptr_ptr + row, mask=mask, other=0) + length // PAGE_SIZE
    slot = tl.load(tail_slots_ptr + place, mask=grows & (place < num_tail_slots), other=-1)
    tl.store(slots_ptr + row, slot, mask=mask)
    tl.store(offsets_ptr + row, length % PAGE_SIZE, mask=mask)
    tl.store(tail_lens_ptr + row, length + grows.to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["vocab", "part"])
def argmax_kernel(
    logits_ptr, values_ptr, indices_ptr, stride_logits, vocab, part, BLOCK: tl.constexpr
):
    """Find the largest of `part` logits of a row, and the first index that has it. Grid: (rows,
    parts). values, indices: [rows, parts]. NaN counts as infinite."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = split * part
    end = tl.minimum(begin + part, vocab)
    best = float("-inf")
    index = begin
    for first in range(begin, end, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride_logits + offs, mask=offs < end, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        value, place = tl.max(x, axis=0, return_indices=True)
        index = tl.where(value > best, first + place, index)
        best = tl.maximum(best, value)
    place = row * tl.num_programs(1) + split
    tl.store(values_ptr + place, best)
    tl.store(indices_ptr + place, index)


@triton.jit(do_not_specialize=["batch", "max_steps"])
def end_step_kernel(
    values_ptr,
    indices_ptr,
    tail_lens_ptr,
    limits_ptr,
    input_ids_ptr,
    positions_ptr,
    drafts_ptr,
    step_ptr,
    stride_drafts,
    batch,
    max_steps,
    PARTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Run the rest of ops/steps.py's StepEnd. Grid: one program, because step may grow only after
    all rows have read it."""
    step = tl.load(step_ptr)
    parts = tl.arange(0, PARTS)
    for first in range(0, batch, BLOCK_B):
        row = first + tl.arange(0, BLOCK_B)
        mask = row < batch
        place = row[:, None] * PARTS + parts[None, :]
        value = tl.load(values_ptr + place, mask=mask[:, None], other=float("-inf"))
        index = tl.load(indices_ptr + place, mask=mask[:, None], other=0)
        # On a tie take the first part, whose index is the smallest.
        best = tl.max(value, axis=1)
        index = tl.where(value == best[:, None], index, 0x7FFFFFFF)
        chosen = tl.min(index, axis=1).to(tl.int64)
        kept = mask & (step < max_steps)
        tl.store(drafts_ptr + step * stride_drafts + row, chosen, mask=kept)
        tl.store(input_ids_ptr + row, chosen, mask=mask)
        length = tl.load(tail_lens_ptr + row, mask=mask, other=0)
        moves = length < tl.load(limits_ptr + row, mask=mask, other=0)
        position = tl.load(positions_ptr + row, mask=mask, other=0)
        tl.store(positions_ptr + row, position + moves.to(tl.int64), mask=mask)
    # Wait until every warp has read step.
    tl.debug_barrier()
    tl.store(step_ptr, step + 1)
