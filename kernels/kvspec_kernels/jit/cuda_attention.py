"""Launch cuda/draft_attention.cu and cuda/draft_join.cu: the Hopper back end of draft
attention, over pages and the tail."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvspec_kernels.codecs.coverage import CUDA_DRAFT, KernelPath
from kvspec_kernels.codecs.kernels import Arithmetic
from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import TWO_BIT_STEP, anchor_layout
from kvspec_kernels.jit import nvrtc
from kvspec_kernels.jit.tail import tail_arguments

LOG2_E = 1.4426950408889634
MULTIPROCESSOR_REGISTERS = 65536
# Shared memory of a Hopper multiprocessor, and the part of it that CUDA reserves for each block.
MULTIPROCESSOR_SHARED = 228 * 1024
BLOCK_RESERVED = 1024
# Parts of a query row that a warp joins at a time. Rows with more parts get more warps.
PARTS_AT_ONCE = 8
MOST_JOIN_WARPS = 8
# Registers of a thread, those for all but what grows with the query rows, and query rows of a
# column tile.
MOST_REGISTERS, OTHER_REGISTERS = 255, 80
TILE_ROWS: dict[Arithmetic, int] = {"fp16": 8, "int8": 4}
# Query channels, over all heads, that a lane holds while its warp attends to the tail.
TAIL_CHANNELS = 16


@dataclass(frozen=True)
class AttentionShape:
    """Codec, sizes and number formats for which a kernel is compiled."""

    settings: CodecSpec
    page_size: int
    head_dim: int
    num_qo_heads: int
    num_kv_heads: int
    q_dtype: torch.dtype
    arithmetic: Arithmetic = "fp16"
    # True if each KV head of a draft reads its own list of pages.
    lists_by_head: bool = False
    # Query tokens of each request of a draft.
    num_rows: int = 1

    @property
    def query_heads(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def group(self) -> int:
        """Query rows for which a warp attends: query heads of one query token, or of several."""
        return self.num_rows * self.query_heads // self.head_split

    @property
    def head_split(self) -> int:
        """Number of times that each KV head is read: more than once if registers would spill
        otherwise."""
        heads = self.query_heads
        if self.num_rows == 1:
            return 2 if self.head_dim > 128 and heads > 8 and heads % 2 == 0 else 1
        rows = self.num_rows * heads
        most_tiles = max((MOST_REGISTERS - OTHER_REGISTERS) // _tile_registers(self), 1)
        most_rows = most_tiles * TILE_ROWS[self.arithmetic]
        return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most_rows)


def draft_supported(shape: AttentionShape, device: torch.device) -> bool:
    """Return True if the CUDA back end drafts for this shape."""
    return supported(shape, device) and shape.arithmetic in arithmetics(shape.settings)


def supported(shape: AttentionShape, device: torch.device) -> bool:
    """Return True if the conditions of both draft and verify attention hold."""
    return (
        nvrtc.is_hopper(device)
        and takes(CUDA_DRAFT, shape)
        and shape.settings.cuda_attention() is not None
    )


def takes(path: KernelPath, shape: AttentionShape) -> bool:
    """Return True if a kernel path takes the sizes of a shape."""
    return path.takes(
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        group=shape.query_heads,
        dtype=str(shape.q_dtype).removeprefix("torch."),
    )


def arithmetics(settings: CodecSpec) -> tuple[Arithmetic, ...]:
    """Return the number formats of draft attention over a codec's anchors, fp16 before int8."""
    codec = settings.cuda_attention()
    return () if codec is None else codec.arithmetics


# Output [batch, num_qo_heads, head_dim], like the query, and base-2 log-sum-exp
# [batch, num_qo_heads] in fp32; both contiguous.
State = tuple[torch.Tensor, torch.Tensor]


class DraftKernel:
    """Draft attention of one shape on one device, and the join of its parts by join_warps warps a
    query row. Holds no state besides the compiled code."""

    def __init__(self, shape: AttentionShape, join_warps: int, device: torch.device) -> None:
        """join_warps: a result of join_warps()."""
        self.shape = shape
        self._plan = occupancy(shape)
        (self._draft,) = nvrtc.load(
            "draft_attention.cu", ("draft_attention",), draft_defines(shape), device
        )
        self._draft.allow_shared_memory(self._plan.shared_bytes)
        self._join_warps = join_warps
        defines = draft_join_defines(shape, join_warps)
        (self._join,) = nvrtc.load("draft_join.cu", ("draft_join",), defines, device)
        # Number of blocks that share the pages.
        self.grid = num_blocks(self._plan.blocks, device)
        self._num_kv_heads = shape.num_kv_heads * shape.head_split

    @property
    def tail_parts(self) -> int:
        """Blocks for a request's tail and one KV head."""
        return -(-self.shape.group // tail_heads(self.shape))

    def workspace_bytes(self, batch: int) -> int:
        """Return the bytes of partial outputs and states: two for each block, for any batch."""
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
        """Enqueue attention on the current stream. Writes `workspace`, rows of `past` and, if there
        is a tail, all of `recent`; join() reads them. Rows of `past` and `recent` are in the order
        of requests, KV heads, query tokens and query heads.

        q: [batch * num_rows, num_qo_heads, head_dim], the last dimension contiguous; anchors:
        [pages, num_kv_heads, record] uint8; indptr [batch + 1], indices, last_page_len [batch]
        int32 on the device; tail: the tensors of Tail, or None. All as in ops/attention_plan.py.
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
                ctypes.c_int(indices.stride(0)),
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
        """Enqueue the join on the current stream, after attend() with the same indptr, workspace
        and past. Writes `out`. recent: None if there was no tail."""
        batch = len(indptr) - 1
        none = (ctypes.c_void_p(), ctypes.c_void_p())
        self._join.launch(
            batch * self.shape.num_rows * self.shape.num_qo_heads,
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
    """Return the blocks of a launch. blocks: number of blocks that a multiprocessor holds."""
    return torch.cuda.get_device_properties(device).multi_processor_count * blocks


def join_warps(parts: float) -> int:
    """Return the warps that share the parts of a query row. parts: about how many parts it has."""
    wanted = int(-(-parts // PARTS_AT_ONCE))
    return min(1 << max(wanted - 1, 0).bit_length(), MOST_JOIN_WARPS)


def draft_kernel(shape: AttentionShape, batch: int, device: torch.device) -> DraftKernel:
    """Return the kernel of a shape and number of requests."""
    heads = batch * shape.num_kv_heads * shape.head_split
    parts = num_blocks(occupancy(shape).blocks, device) / heads
    return _draft_kernel(shape, join_warps(parts), device)


@functools.lru_cache(maxsize=64)
def _draft_kernel(shape: AttentionShape, join_warps: int, device: torch.device) -> DraftKernel:
    """Return the kernel, compiled once for each process and device."""
    return DraftKernel(shape, join_warps, device)


def draft_defines(shape: AttentionShape) -> dict[str, int | str]:
    """Return the constants that cuda/draft_attention.cu is compiled with."""
    plan = occupancy(shape)
    return record_defines(shape) | {
        "INT8": int(shape.arithmetic == "int8"),
        "TWO_BIT_STEP": TWO_BIT_STEP,
        "GROUP": shape.group,
        "HEAD_SPLIT": shape.head_split,
        "ROWS": shape.num_rows,
        "QUERY_HEADS": shape.query_heads,
        "LISTS_BY_HEAD": int(shape.lists_by_head),
        "WARPS": plan.warps,
        "HALVES": plan.halves,
        "BLOCKS": plan.blocks,
        "TAIL_HEADS": tail_heads(shape),
    }


def draft_join_defines(shape: AttentionShape, join_warps: int) -> dict[str, int | str]:
    """Return the constants that cuda/draft_join.cu is compiled with."""
    own = {
        "GROUP": shape.group,
        "HEAD_SPLIT": shape.head_split,
        "ROWS": shape.num_rows,
        "QUERY_HEADS": shape.query_heads,
        "WARPS": occupancy(shape).warps,
    }
    return row_join_defines(shape, join_warps) | own


def row_join_defines(shape: AttentionShape, join_warps: int) -> dict[str, int | str]:
    """Return the constants of cuda/join_rows.cuh."""
    return {
        "HEAD_DIM": shape.head_dim,
        "JOIN_WARPS": join_warps,
        "PARTS_AT_ONCE": PARTS_AT_ONCE,
        "Q_BF16": int(shape.q_dtype == torch.bfloat16),
    }


def record_defines(shape: AttentionShape) -> dict[str, int | str]:
    """Return the constants of a record that draft and verify kernels share."""
    layout = anchor_layout(shape.settings, shape.page_size, shape.head_dim)
    k_bytes = layout["v_codes"].offset
    codec = shape.settings.cuda_attention()
    assert codec is not None, f"cuda/draft_attention.cu does not cover {shape.settings}"
    # Metadata per token is one row. Metadata per channel has one row for each chunk.
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
    """Blocks of a multiprocessor, warps of a block, halves of pages (K or V) in a warp's ring, and
    shared memory of a block."""

    blocks: int
    warps: int
    halves: int
    shared_bytes: int


def occupancy(shape: AttentionShape) -> Occupancy:
    """Return the occupancy that registers and shared memory allow: most warps a block first, then
    most blocks, then most halves."""
    registers = OTHER_REGISTERS + _column_tiles(shape) * _tile_registers(shape)
    by_registers = MULTIPROCESSOR_REGISTERS // (32 * (-(-min(registers, MOST_REGISTERS) // 8) * 8))
    # Three halves are the least that keep a fetch going while the warp reads either half. More
    # blocks gain more speed than a fourth half.
    for warps in (4, 2, 1):
        for blocks in range(by_registers // warps, 0, -1):
            for halves in (4, 3):
                nbytes = shared_bytes(shape, warps, halves)
                if blocks * (nbytes + BLOCK_RESERVED) <= MULTIPROCESSOR_SHARED:
                    return Occupancy(blocks, warps, halves, nbytes)
    raise nvrtc.CudaError(f"pages of {shape.page_size} tokens do not fit shared memory")


def shared_bytes(shape: AttentionShape, warps: int, halves: int) -> int:
    """Return the bytes of shared memory of a block: query, rings and a barrier for each half. The
    warps' states later replace the rings, or in blocks of the tail the query."""
    layout = anchor_layout(shape.settings, shape.page_size, shape.head_dim)
    k_bytes = layout["v_codes"].offset
    half = max(k_bytes, layout.nbytes - k_bytes)
    query = _column_tiles(shape) * shape.head_dim // 16 * 512
    rings = warps * halves * half
    states = warps * shape.group * (shape.head_dim + 2) * 4
    return query + -(-max(rings, states) // 8) * 8 + warps * halves * 8


def tail_heads(shape: AttentionShape) -> int:
    """Return the number of query rows of one block of the tail."""
    return min(shape.group, TAIL_CHANNELS * 32 // shape.head_dim)


def _column_tiles(shape: AttentionShape) -> int:
    """Return the number of right operands, each of 8 columns. A query row takes one column, or two
    in INT8."""
    return -(-shape.group // TILE_ROWS[shape.arithmetic])


def _tile_registers(shape: AttentionShape) -> int:
    """Return the registers of a column tile, as measured: output, folded query, scores and
    probabilities."""
    scores = shape.page_size * 3 // (16 if shape.arithmetic == "int8" else 8)
    return shape.head_dim * 3 // 8 + scores
