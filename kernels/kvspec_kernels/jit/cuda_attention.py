"""Launches cuda/draft_attention.cu: the Hopper back end of draft attention."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Literal

import torch

from kvspec_kernels.formats import (
    TWO_BIT_STEP,
    Log4Settings,
    Uniform4Settings,
    anchor_layout,
)
from kvspec_kernels.jit import nvrtc

LOG2_E = 1.4426950408889634
MULTIPROCESSOR_REGISTERS = 65536
# A Hopper multiprocessor's shared memory, of which each block takes 1 KB for itself.
MULTIPROCESSOR_SHARED = 228 * 1024
BLOCK_RESERVED = 1024
HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP = 16

# fp16: codes become fp16 numbers. int8: they stay integers, and what they are multiplied with
# becomes such (HACK, section 4).
Arithmetic = Literal["fp16", "int8"]


@dataclass(frozen=True)
class AttentionShape:
    """What a kernel is compiled for."""

    settings: Log4Settings | Uniform4Settings
    page_size: int
    head_dim: int
    num_qo_heads: int
    num_kv_heads: int
    q_dtype: torch.dtype
    arithmetic: Arithmetic = "fp16"

    @property
    def group(self) -> int:
        """Query heads a warp attends for."""
        return self.num_qo_heads // self.num_kv_heads // self.head_split

    @property
    def head_split(self) -> int:
        """How often each KV head is read: twice where one reading's registers would spill."""
        group = self.num_qo_heads // self.num_kv_heads
        return 2 if self.head_dim > 128 and group > 8 and group % 2 == 0 else 1


def draft_supported(shape: AttentionShape, device: torch.device) -> bool:
    """Whether the CUDA back end drafts for this shape."""
    return supported(shape, device) and shape.arithmetic in arithmetics(shape.settings)


def supported(shape: AttentionShape, device: torch.device) -> bool:
    """What drafting and verifying need alike; bulk copies need compute capability 9.0."""
    group = shape.num_qo_heads // shape.num_kv_heads
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and shape.head_dim in HEAD_DIMS
        and 1 <= group <= MAX_GROUP
        and shape.q_dtype in (torch.bfloat16, torch.float16)
        and _whole_steps(shape.settings)
    )


def arithmetics(settings: Log4Settings | Uniform4Settings) -> tuple[Arithmetic, ...]:
    """What a codec's anchors can be attended to in. log4's 4-bit codes became bytes by a table of
    8 magnitudes and a sign when that was tried, which took 1.2 to 1.4 times as long as fp16."""
    if settings.anchor_bits == 2:
        return ("int8",)
    return ("fp16", "int8") if isinstance(settings, Uniform4Settings) else ("fp16",)


def _whole_steps(settings: Log4Settings | Uniform4Settings) -> bool:
    """Whether metadata changes between pairs of 16 tokens only, and values need no table."""
    if isinstance(settings, Uniform4Settings):
        return settings.k_group % 32 == 0
    chunks = (settings.k_chunk, settings.v_chunk)
    return settings.levels == "linear" and all(chunk % 32 == 0 for chunk in chunks)


class DraftKernel:
    """Draft attention of one shape on one device. Holds no state besides the compiled code."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.shape = shape
        self._plan = occupancy(shape)
        (self._draft,) = nvrtc.load(
            "draft_attention.cu", ("draft_attention",), draft_defines(shape), device
        )
        self._draft.allow_shared_memory(self._plan.shared_bytes)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.grid = multiprocessors * self._plan.blocks

    def workspace_bytes(self, batch: int) -> int:
        """Counters of the arrived parts, which must be zero before the first run and are left so,
        then partial outputs and states: two for each block."""
        return self.counter_bytes(batch) + self._part_bytes(self.shape.head_dim + 2)

    def run(
        self,
        q: torch.Tensor,
        anchors: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sm_scale: float,
        workspace: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Enqueue on the current stream; writes `out` and `lse`, uses `workspace`.

        q, out: [batch, num_qo_heads, head_dim], the last dimension contiguous and `out` whole;
        lse: [batch, num_qo_heads] fp32, base 2; anchors: [pages, num_kv_heads, record] uint8;
        indptr [batch + 1], indices, last_page_len [batch] int32 on the device.
        """
        shape, batch = self.shape, len(indptr) - 1
        out_from = self.counter_bytes(batch)
        stat_from = out_from + self._part_bytes(shape.head_dim)
        self._draft.launch(
            self.grid,
            self._plan.warps * 32,
            (
                q,
                ctypes.c_int64(q.stride(0)),
                ctypes.c_int64(q.stride(1)),
                anchors,
                ctypes.c_int64(anchors.stride(0)),
                indptr,
                indices,
                last_page_len,
                ctypes.c_int(batch),
                ctypes.c_int(shape.num_kv_heads * shape.head_split),
                ctypes.c_float(sm_scale * LOG2_E),
                workspace[out_from:],
                workspace[stat_from:],
                workspace,
                out,
                lse,
            ),
            self._plan.shared_bytes,
        )

    def counter_bytes(self, batch: int) -> int:
        """Bytes at the start of the workspace that must be zero before the first run."""
        return -(-batch * self.shape.num_kv_heads * self.shape.head_split * 4 // 16) * 16

    def _part_bytes(self, values: int) -> int:
        return 2 * self.grid * self.shape.group * values * 4


@functools.lru_cache(maxsize=64)
def draft_kernel(shape: AttentionShape, device: torch.device) -> DraftKernel:
    """The kernel of a shape, compiled once a process and device."""
    return DraftKernel(shape, device)


def draft_defines(shape: AttentionShape) -> dict[str, int | str]:
    """The constants that cuda/draft_attention.cu is compiled with."""
    plan = occupancy(shape)
    return record_defines(shape) | {
        "INT8": int(shape.arithmetic == "int8"),
        "TWO_BIT_STEP": TWO_BIT_STEP,
        "GROUP": shape.group,
        "HEAD_SPLIT": shape.head_split,
        "WARPS": plan.warps,
        "HALVES": plan.halves,
        "BLOCKS": plan.blocks,
    }


def record_defines(shape: AttentionShape) -> dict[str, int | str]:
    """What both kernels know of a record."""
    layout = anchor_layout(shape.settings, shape.page_size, shape.head_dim)
    k_bytes = layout["v_codes"].offset
    is_log = isinstance(shape.settings, Log4Settings)
    return {
        "HEAD_DIM": shape.head_dim,
        "PAGE_SIZE": shape.page_size,
        "LOG4": int(is_log),
        "ANCHOR_BITS": shape.settings.anchor_bits,
        "Q_BF16": int(shape.q_dtype == torch.bfloat16),
        "K_BYTES": k_bytes,
        "V_BYTES": layout.nbytes - k_bytes,
        "RECORD_BYTES": layout.nbytes,
        "K_ROWS": layout["k_centre" if is_log else "k_scale"].shape[0],
        "V_ROWS": layout["v_centre"].shape[0] if is_log else 1,
        "TOP": shape.settings.top if isinstance(shape.settings, Log4Settings) else 1,
    }


@dataclass(frozen=True)
class Occupancy:
    """Blocks a multiprocessor, their warps, and halves of a page (K or V) in a warp's ring."""

    blocks: int
    warps: int
    halves: int
    shared_bytes: int


def occupancy(shape: AttentionShape) -> Occupancy:
    """As many warps as registers and shared memory allow."""
    columns = _column_tiles(shape)
    # Output, folded query, scores and probabilities, and what the rest was seen to take.
    if shape.arithmetic == "int8":
        each = shape.head_dim * 3 // 8 + shape.page_size * 3 // 16
    else:
        each = shape.head_dim * 3 // 8 + shape.page_size * 3 // 8
    registers = 80 + columns * each
    by_registers = MULTIPROCESSOR_REGISTERS // (32 * (-(-min(registers, 255) // 8) * 8))
    # Three halves are the least that keeps a fetch going while either half is being read; more
    # blocks are worth more than a fourth.
    for warps in (4, 2, 1):
        for blocks in range(by_registers // warps, 0, -1):
            for halves in (4, 3):
                nbytes = shared_bytes(shape, warps, halves)
                if blocks * (nbytes + BLOCK_RESERVED) <= MULTIPROCESSOR_SHARED:
                    return Occupancy(blocks, warps, halves, nbytes)
    raise nvrtc.CudaError(f"pages of {shape.page_size} tokens do not fit shared memory")


def shared_bytes(shape: AttentionShape, warps: int, halves: int) -> int:
    """Shared memory of a block: query, rings with a barrier each half, and scratch."""
    layout = anchor_layout(shape.settings, shape.page_size, shape.head_dim)
    k_bytes = layout["v_codes"].offset
    half = max(k_bytes, layout.nbytes - k_bytes)
    query = _column_tiles(shape) * shape.head_dim // 16 * 512
    return query + warps * halves * (half + 8) + 16


def _column_tiles(shape: AttentionShape) -> int:
    """Products' right operands of 8 columns: a head has one, or two for INT8."""
    heads = 4 if shape.arithmetic == "int8" else 8
    return -(-shape.group // heads)
