"""Launches cuda/draft_attention.cu and cuda/draft_join.cu: the Hopper back end of draft
attention, over pages and the tail behind them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvspec_kernels.codecs.kernels import Arithmetic
from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import TWO_BIT_STEP, anchor_layout
from kvspec_kernels.jit import nvrtc
from kvspec_kernels.jit.tail import tail_arguments

LOG2_E = 1.4426950408889634
MULTIPROCESSOR_REGISTERS = 65536
# A Hopper multiprocessor's shared memory, of which each block takes 1 KB for itself.
MULTIPROCESSOR_SHARED = 228 * 1024
BLOCK_RESERVED = 1024
HEAD_DIMS = (64, 96, 128, 256)
# Of a query row, that a warp joins at a time; more warps are for more.
PARTS_AT_ONCE = 8
MOST_JOIN_WARPS = 8
MAX_GROUP = 16
# Channels of its queries that a lane holds while a warp attends to the tail, all heads together.
TAIL_CHANNELS = 16


@dataclass(frozen=True)
class AttentionShape:
    """What a kernel is compiled for."""

    settings: CodecSpec
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
        and shape.settings.cuda_attention() is not None
    )


def arithmetics(settings: CodecSpec) -> tuple[Arithmetic, ...]:
    """Return what a codec's anchors can be attended to in, fp16 before int8."""
    codec = settings.cuda_attention()
    return () if codec is None else codec.arithmetics


# Output [batch, num_qo_heads, head_dim], like the query, and log-sum-exp [batch, num_qo_heads] in
# fp32, to base 2; both contiguous.
State = tuple[torch.Tensor, torch.Tensor]


class DraftKernel:
    """Draft attention of one shape on one device, for as many requests as leave about as many parts
    of each as join_warps are for. Holds no state besides the compiled code."""

    def __init__(self, shape: AttentionShape, join_warps: int, device: torch.device) -> None:
        """join_warps: as join_warps() has it."""
        self.shape = shape
        self._plan = occupancy(shape)
        (self._draft,) = nvrtc.load(
            "draft_attention.cu", ("draft_attention",), draft_defines(shape), device
        )
        self._draft.allow_shared_memory(self._plan.shared_bytes)
        self._join_warps = join_warps
        defines = draft_join_defines(shape, join_warps)
        (self._join,) = nvrtc.load("draft_join.cu", ("draft_join",), defines, device)
        # Blocks that share the pages.
        self.grid = num_blocks(self._plan.blocks, device)
        self._num_kv_heads = shape.num_kv_heads * shape.head_split

    @property
    def tail_parts(self) -> int:
        """Blocks that a request's tail takes of a KV head."""
        return -(-self.shape.group // tail_heads(self.shape))

    def workspace_bytes(self, batch: int) -> int:
        """Partial outputs and states: two for each block, however many requests."""
        return self._part_bytes(self.shape.head_dim + 2)

    def attend(
        self,
        q: torch.Tensor,
        anchors: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        tail: Sequence[torch.Tensor] | None,
        sm_scale: float,
        workspace: torch.Tensor,
        past: State,
        recent: State,
    ) -> None:
        """Enqueue on the current stream; writes `workspace`, rows of `past` and, where there is a
        tail, all of `recent`, for join().

        q: [batch, num_qo_heads, head_dim], the last dimension contiguous; anchors: [pages,
        num_kv_heads, record] uint8; indptr [batch + 1], indices, last_page_len [batch] int32 on the
        device; tail: the tensors of ops/attention_plan.py's Tail, or None.
        """
        batch = len(indptr) - 1
        parts = self.tail_parts if tail is not None else 0
        self._draft.launch(
            self.grid + batch * self._num_kv_heads * parts,
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
                tail_arguments(tail),
                ctypes.c_int(batch),
                ctypes.c_int(self._num_kv_heads),
                ctypes.c_int(self.grid),
                ctypes.c_float(sm_scale * LOG2_E),
                workspace,
                workspace[self._part_bytes(self.shape.head_dim) :],
                *past,
                *recent,
            ),
            self._plan.shared_bytes,
        )

    def join(
        self,
        indptr: torch.Tensor,
        workspace: torch.Tensor,
        past: State,
        recent: State | None,
        out: State,
    ) -> None:
        """Enqueue on the current stream, behind attend() of the same indptr, workspace and past:
        `out` of these and `recent`, None where there was no tail."""
        batch = len(indptr) - 1
        none = (ctypes.c_void_p(), ctypes.c_void_p())
        self._join.launch(
            batch * self.shape.num_qo_heads,
            self._join_warps * 32,
            (
                workspace,
                workspace[self._part_bytes(self.shape.head_dim) :],
                indptr,
                ctypes.c_int(batch),
                ctypes.c_int(self._num_kv_heads),
                ctypes.c_int(self.grid),
                *past,
                *(recent or none),
                *out,
            ),
        )

    def _part_bytes(self, values: int) -> int:
        return 2 * self.grid * self.shape.group * values * 4


def num_blocks(blocks: int, device: torch.device) -> int:
    """Blocks of a launch, of which a multiprocessor holds so many."""
    return torch.cuda.get_device_properties(device).multi_processor_count * blocks


def join_warps(parts: float) -> int:
    """Warps that share a query row's parts, of which there are about so many."""
    wanted = int(-(-parts // PARTS_AT_ONCE))
    return min(1 << max(wanted - 1, 0).bit_length(), MOST_JOIN_WARPS)


def draft_kernel(shape: AttentionShape, batch: int, device: torch.device) -> DraftKernel:
    """The kernel of a shape and number of requests."""
    heads = batch * shape.num_kv_heads * shape.head_split
    parts = num_blocks(occupancy(shape).blocks, device) / heads
    return _draft_kernel(shape, join_warps(parts), device)


@functools.lru_cache(maxsize=64)
def _draft_kernel(shape: AttentionShape, join_warps: int, device: torch.device) -> DraftKernel:
    """Compiled once a process and device."""
    return DraftKernel(shape, join_warps, device)


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
        "TAIL_HEADS": tail_heads(shape),
    }


def draft_join_defines(shape: AttentionShape, join_warps: int) -> dict[str, int | str]:
    """The constants that cuda/draft_join.cu is compiled with."""
    own = {"GROUP": shape.group, "WARPS": occupancy(shape).warps}
    return row_join_defines(shape, join_warps) | own


def row_join_defines(shape: AttentionShape, join_warps: int) -> dict[str, int | str]:
    """What cuda/join_rows.cuh needs."""
    return {
        "HEAD_DIM": shape.head_dim,
        "JOIN_WARPS": join_warps,
        "PARTS_AT_ONCE": PARTS_AT_ONCE,
        "Q_BF16": int(shape.q_dtype == torch.bfloat16),
    }


def record_defines(shape: AttentionShape) -> dict[str, int | str]:
    """What both kernels know of a record."""
    layout = anchor_layout(shape.settings, shape.page_size, shape.head_dim)
    k_bytes = layout["v_codes"].offset
    codec = shape.settings.cuda_attention()
    assert codec is not None, f"cuda/draft_attention.cu does not cover {shape.settings}"
    # Metadata of a token are alone in their row, those of channels one row a chunk.
    v_scale = layout["v_scale"].shape
    return {
        **codec.defines,
        "HEAD_DIM": shape.head_dim,
        "PAGE_SIZE": shape.page_size,
        "ANCHOR_BITS": shape.settings.anchor_bits,
        "Q_BF16": int(shape.q_dtype == torch.bfloat16),
        "K_BYTES": k_bytes,
        "V_BYTES": layout.nbytes - k_bytes,
        "RECORD_BYTES": layout.nbytes,
        "K_ROWS": layout["k_scale"].shape[0],
        "V_ROWS": v_scale[0] if len(v_scale) == 2 else 1,
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
    """Shared memory of a block: query, and rings with a barrier each half, in whose place the
    warps' states are afterwards. Blocks of the tail have theirs where the query is."""
    layout = anchor_layout(shape.settings, shape.page_size, shape.head_dim)
    k_bytes = layout["v_codes"].offset
    half = max(k_bytes, layout.nbytes - k_bytes)
    query = _column_tiles(shape) * shape.head_dim // 16 * 512
    rings = warps * halves * half
    states = warps * shape.group * (shape.head_dim + 2) * 4
    return query + -(-max(rings, states) // 8) * 8 + warps * halves * 8


def tail_heads(shape: AttentionShape) -> int:
    """Query heads that a block attends for to the tail."""
    return min(shape.group, TAIL_CHANNELS * 32 // shape.head_dim)


def _column_tiles(shape: AttentionShape) -> int:
    """Products' right operands of 8 columns: a head has one, or two for INT8."""
    heads = 4 if shape.arithmetic == "int8" else 8
    return -(-shape.group // heads)
