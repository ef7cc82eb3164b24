"""Triton kernel that copies rows of bytes, also from host memory."""

from __future__ import annotations

import triton
import triton.language as tl


# Compiled once, for any number of pages, and lists of rows from any place on.
@triton.jit(
    do_not_specialize=["num_blocks", "blocks_a_row"],
    do_not_specialize_on_alignment=["target_rows_ptr", "source_rows_ptr"],
)
def copy_rows_kernel(
    target_ptr,
    source_ptr,
    target_rows_ptr,
    source_rows_ptr,
    num_blocks,
    blocks_a_row,
    row_words,
    stride_target,
    stride_source,
    BLOCK: tl.constexpr,
):
    """Copy words of rows source_rows to rows target_rows. Grid: any number of programs, which share
    the blocks."""
    pid = tl.program_id(0)
    for block in range(pid, num_blocks, tl.num_programs(0)):
        row = block // blocks_a_row
        offs_word = block % blocks_a_row * BLOCK + tl.arange(0, BLOCK)
        mask_word = offs_word < row_words
        source_row = tl.load(source_rows_ptr + row).to(tl.int64) * stride_source
        target_row = tl.load(target_rows_ptr + row).to(tl.int64) * stride_target
        words = tl.load(source_ptr + source_row + offs_word, mask=mask_word, other=0)
        tl.store(target_ptr + target_row + offs_word, words, mask=mask_word)
