"""Copy rows of bytes from pinned host memory into a pool on the device, in one launch."""

from __future__ import annotations

import torch

from kvspec_kernels.jit.copy_rows import copy_rows_kernel

WORD_BYTES = 4
# Few programs, so that other kernels keep most multiprocessors. Together the programs have enough
# bytes in flight to hide the link's latency.
MAX_PROGRAMS = 32
BLOCK_WORDS = 2048


def copy_rows(
    target: torch.Tensor,
    target_rows: torch.Tensor,
    source: torch.Tensor,
    source_rows: torch.Tensor,
) -> None:
    """Set target[target_rows[i]] = source[source_rows[i]], in place and in any order of i.

    target, source: [S, ...] and [T, ...] uint8. Rows have equal shapes, are contiguous and start at
        multiples of 4 bytes. source may be in pinned host memory, which the kernel reads over the
        link.
    target_rows, source_rows: [N] int32 or int64 on target's device; target_rows distinct.
    Does not wait for the device, and allocates nothing. Raises ValueError for tensors that do not
    fit; row numbers are not checked.
    """
    for name, pool in (("target", target), ("source", source)):
        if pool.dtype != torch.uint8 or pool.ndim < 2 or not pool[:1].is_contiguous():
            raise ValueError(f"{name} must be uint8 with contiguous rows, got {_of(pool)}")
        if pool.stride(0) % WORD_BYTES or pool.data_ptr() % WORD_BYTES:
            raise ValueError(f"rows of {name} must start at multiples of {WORD_BYTES} bytes")
    if target.shape[1:] != source.shape[1:] or target[:1].numel() % WORD_BYTES:
        raise ValueError(
            f"rows of target and source must have equal shapes, in whole words of {WORD_BYTES} "
            f"bytes, got {_of(target)} and {_of(source)}"
        )
    if source.device != target.device and not (source.device.type == "cpu" and source.is_pinned()):
        raise ValueError(f"source must be on {target.device} or pinned, got {_of(source)}")
    for name, rows in (("target_rows", target_rows), ("source_rows", source_rows)):
        if rows.ndim != 1 or rows.device != target.device or rows.dtype.is_floating_point:
            raise ValueError(f"{name} must be integers [N] on {target.device}, got {_of(rows)}")
    if len(target_rows) != len(source_rows):
        raise ValueError(
            "target_rows and source_rows must have equal lengths, got "
            f"{len(target_rows)} and {len(source_rows)}"
        )
    row_words = target[:1].numel() // WORD_BYTES
    blocks_a_row = -(-row_words // BLOCK_WORDS)
    num_blocks = len(target_rows) * blocks_a_row
    if not num_blocks:
        return
    copy_rows_kernel[(min(num_blocks, MAX_PROGRAMS),)](
        target_ptr=target.flatten(1).view(torch.int32),
        source_ptr=source.flatten(1).view(torch.int32),
        target_rows_ptr=target_rows,
        source_rows_ptr=source_rows,
        num_blocks=num_blocks,
        blocks_a_row=blocks_a_row,
        row_words=row_words,
        stride_target=target.stride(0) // WORD_BYTES,
        stride_source=source.stride(0) // WORD_BYTES,
        BLOCK=BLOCK_WORDS,
    )


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
