"""Launch cuda/page_scores.cu: the Hopper back end of page scores."""

from __future__ import annotations

import ctypes
import functools

import torch

from kvspec_kernels.formats import TWO_BIT_STEP
from kvspec_kernels.jit import nvrtc
from kvspec_kernels.jit.cuda_attention import (
    BLOCK_RESERVED,
    LOG2_E,
    MULTIPROCESSOR_REGISTERS,
    MULTIPROCESSOR_SHARED,
    AttentionShape,
    arithmetics,
    num_blocks,
    record_defines,
    supported,
)

WARPS = 4
# Blocks of a multiprocessor, most first, and pages in a warp's ring.
BLOCKS, HALVES = (4, 3, 2, 1), (4, 3, 2)
# Registers of a thread for all but the scores and the folded queries, as measured, and for these.
REGISTERS, MOST_REGISTERS = 64, 128
MOST_COLUMNS = 4


def scores_supported(shape: AttentionShape, device: torch.device) -> bool:
    """Return True if the CUDA back end scores pages for this shape. It chooses the arithmetic."""
    return supported(shape, device) and bool(arithmetics(shape.settings))


class ScoreKernel:
    """Log-sum-exps of up to most_queries queries a request over pages, for one shape."""

    def __init__(self, shape: AttentionShape, most_queries: int, device: torch.device) -> None:
        self._num_kv_heads = shape.num_kv_heads
        defines = score_defines(shape, most_queries)
        (self._scores,) = nvrtc.load("page_scores.cu", ("page_scores",), defines, device)
        self._shared = shared_bytes(defines)
        self._scores.allow_shared_memory(self._shared)
        self._grid = num_blocks(int(defines["BLOCKS"]), device)

    def score(
        self,
        q: torch.Tensor,
        anchors: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        q_begin: torch.Tensor,
        num_queries: torch.Tensor,
        sm_scale: float,
        lse: torch.Tensor,
    ) -> None:
        """Enqueue on the current stream, which writes `lse` [indices, num_kv_heads, most_queries *
        group] fp32. The other arguments are those of ops/page_selection.py."""
        self._scores.launch(
            self._grid,
            WARPS * 32,
            (
                q,
                ctypes.c_int64(q.stride(0)),
                ctypes.c_int64(q.stride(1)),
                anchors,
                ctypes.c_int64(anchors.stride(0)),
                indptr,
                indices,
                q_begin,
                num_queries,
                ctypes.c_int(len(indptr) - 1),
                ctypes.c_int(self._num_kv_heads),
                ctypes.c_float(sm_scale * LOG2_E),
                lse,
            ),
            self._shared,
        )


@functools.lru_cache(maxsize=16)
def score_kernel(shape: AttentionShape, most_queries: int, device: torch.device) -> ScoreKernel:
    """Return the kernel, compiled once for each process and device."""
    return ScoreKernel(shape, most_queries, device)


def score_defines(shape: AttentionShape, most_queries: int) -> dict[str, int | str]:
    """Return the constants that cuda/page_scores.cu is compiled with."""
    query_heads = shape.num_qo_heads // shape.num_kv_heads
    columns = -(-most_queries * query_heads // 8)
    # Registers of the scores and the folded query of 8 rows, which a warp handles as one column.
    each = shape.page_size // 4 + shape.head_dim // 8
    passes = -(-columns // min(max(MOST_REGISTERS // each, 1), MOST_COLUMNS))
    at_once = -(-columns // passes)
    defines = record_defines(shape) | {
        "INT8": int("int8" in arithmetics(shape.settings)),
        "TWO_BIT_STEP": TWO_BIT_STEP,
        "GROUP": 8 * at_once,
        "PASSES": passes,
        "QUERY_HEADS": query_heads,
        "NUM_ROWS": most_queries * query_heads,
        "WARPS": WARPS,
    }
    by_registers = MULTIPROCESSOR_REGISTERS // (WARPS * 32 * (REGISTERS + each * at_once))
    for blocks in BLOCKS:
        for halves in HALVES:
            sized = defines | {"BLOCKS": blocks, "HALVES": halves}
            fits = blocks * (shared_bytes(sized) + BLOCK_RESERVED) <= MULTIPROCESSOR_SHARED
            if blocks <= max(by_registers, 1) and fits:
                return sized
    raise nvrtc.CudaError(f"pages of {shape.page_size} tokens do not fit shared memory")


def shared_bytes(defines: dict[str, int | str]) -> int:
    """Return the bytes of shared memory of a block: queries, rings and barriers."""
    columns = int(defines["PASSES"]) * int(defines["GROUP"]) // 8
    # In fp16, queries are needed unscaled as well.
    query = columns * (int(defines["HEAD_DIM"]) // 16) * (256 if defines["INT8"] else 512)
    return query + WARPS * int(defines["HALVES"]) * (int(defines["K_BYTES"]) + 8)
