"""Launch cuda/verify_attention.cu, and cuda/verify_join.cu if few requests leave many rows to
join: the Hopper back end of attention over 8-bit pages."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from kvspec_kernels.codecs.coverage import CUDA_VERIFY
from kvspec_kernels.formats import anchor_layout, residual_layout
from kvspec_kernels.jit import nvrtc
from kvspec_kernels.jit.chunks import chunk_blocks
from kvspec_kernels.jit.cuda_attention import (
    BLOCK_RESERVED,
    LOG2_E,
    MULTIPROCESSOR_SHARED,
    AttentionShape,
    join_warps,
    num_blocks,
    record_defines,
    row_join_defines,
    supported,
    takes,
)
from kvspec_kernels.jit.tail import tail_arguments

WARPS = 4
# Halves of pages (K or V) in a block's ring, which holds two pages.
HALVES = 4
MAX_BATCH = 1024
# Blocks of a multiprocessor, by columns of 8 queries that a block handles at once.
BLOCKS_OF_COLUMNS = {1: 4, 2: 4, 4: 3, 8: 3, 16: 2}
# Most parts of a request and KV head that its last block joins. That block joins them in turn while
# other multiprocessors are idle. For more parts a second kernel is faster, despite its launch.
MOST_JOINED = 10
# Most rows of these parts, all together, that the last block reads.
MOST_ROWS_JOINED = 320
# Columns of 8 queries of deterministic attention, whose sums have one order, and warps that merge
# chunks in one order.
CHUNK_COLUMNS = (8, 16)
CHUNK_JOIN_WARPS = 2


def verify_supported(shape: AttentionShape, device: torch.device, batch: int) -> bool:
    """Return True if the CUDA back end covers this shape: whole steps of 64 tokens and channels,
    and 8-bit values that the kernel restores."""
    codec = shape.settings.cuda_attention()
    return (
        codec is not None
        and codec.verifies
        and supported(shape, device)
        and takes(CUDA_VERIFY, shape)
        and batch <= MAX_BATCH
        and _shared_bytes(shape, 1) + BLOCK_RESERVED <= MULTIPROCESSOR_SHARED
    )


class VerifyKernel:
    """Attention over 8-bit pages, for one shape and up to max_qo_len query tokens a request."""

    def __init__(
        self,
        shape: AttentionShape,
        max_qo_len: int,
        device: torch.device,
        join_warps: int,
        *,
        is_deterministic: bool = False,
    ) -> None:
        """join_warps: warps of a second kernel that joins the parts of a request; 0 if the
        request's last block joins them. is_deterministic: chunks of jit/chunks.py, which a second
        kernel joins, take the place of equal shares."""
        self.shape = shape
        queries = max_qo_len * _group(shape)
        self._columns, self._blocks = columns_and_blocks(
            shape, queries, is_deterministic=is_deterministic
        )
        self._max_column_blocks = -(-queries // (8 * self._columns))
        # Rows of a part, of which a narrow request fills few.
        self._part_rows = min(8 * self._columns, queries) if is_deterministic else 8 * self._columns
        self._shared = _shared_bytes(shape, self._columns)
        self._chunk_pages = chunk_blocks(shape.page_size) if is_deterministic else 0
        names = ("verify_attention",)
        defines = verify_defines(
            shape,
            self._columns,
            self._blocks,
            joins_separately=bool(join_warps),
            chunk_pages=self._chunk_pages,
        )
        (self._verify,) = nvrtc.load("verify_attention.cu", names, defines, device)
        self._verify.allow_shared_memory(self._shared)
        self._join: nvrtc.Kernel | None = None
        self._join_warps = join_warps
        if join_warps:
            defines = join_defines(shape, self._columns, join_warps, chunk_pages=self._chunk_pages)
            (self._join,) = nvrtc.load("verify_join.cu", ("verify_join",), defines, device)
        self.grid = num_blocks(self._blocks, device)

    def counter_bytes(self, batch: int) -> int:
        """Return the bytes at the start of the workspace: counters of arrived parts, and the work
        units of requests for a second kernel. Counters must be zero before the first run. Kernels
        of one batch and max_qo_len may share a workspace, with or without a second kernel."""
        return self._shares_from(batch) + _int_bytes(batch + 2)

    def workspace_bytes(self, batch: int, max_pages: int) -> int:
        """Return counter_bytes() plus partial outputs and states: two for each block, or if
        deterministic one for each chunk of up to max_pages pages of all requests together."""
        return self.counter_bytes(batch) + self._part_bytes(
            self.shape.head_dim + 2, self._num_parts(batch, max_pages)
        )

    def run(
        self,
        q: torch.Tensor,
        anchors: torch.Tensor,
        residuals: torch.Tensor,
        residual_slots: torch.Tensor,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        tail: Sequence[torch.Tensor] | None,
        sm_scale: float,
        max_pages: int,
        workspace: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Enqueue on the current stream. Writes `out` and `lse`, and uses `workspace`, of
        workspace_bytes() for max_pages.

        q, out: [num_tokens, num_qo_heads, head_dim], the last dimension contiguous, all of `out`
        contiguous; lse: [num_tokens, num_qo_heads] fp32, base 2; anchors [pages, num_kv_heads,
        record] and residuals [slots, num_kv_heads, record] uint8; the rest int32 on the device.
        tail: the tensors of ops/attention_plan.py's Tail, with `tail_aligned` windows, or None.
        """
        batch = len(indptr) - 1
        out_from = self.counter_bytes(batch)
        num_parts = self._num_parts(batch, max_pages)
        stat_from = out_from + self._part_bytes(self.shape.head_dim, num_parts)
        self._verify.launch(
            self.grid,
            WARPS * 32,
            (
                q,
                ctypes.c_int64(q.stride(0)),
                ctypes.c_int64(q.stride(1)),
                anchors,
                ctypes.c_int64(anchors.stride(0)),
                residuals,
                ctypes.c_int64(residuals.stride(0)),
                residual_slots,
                qo_indptr,
                indptr,
                indices,
                last_page_len,
                tail_arguments(tail),
                ctypes.c_int(batch),
                ctypes.c_int(len(q)),
                ctypes.c_int(self.shape.num_kv_heads),
                ctypes.c_int(self._max_column_blocks),
                ctypes.c_int(self._part_rows),
                ctypes.c_float(sm_scale * LOG2_E),
                workspace[out_from:],
                workspace[stat_from:],
                workspace,
                workspace[self._shares_from(batch) :],
                out,
                lse,
            ),
            self._shared,
        )
        if self._join is not None:
            self._join.launch(
                len(q) * self.shape.num_qo_heads,
                self._join_warps * 32,
                (
                    workspace[out_from:],
                    workspace[stat_from:],
                    workspace[self._shares_from(batch) :],
                    qo_indptr,
                    ctypes.c_int(batch),
                    ctypes.c_int(self.shape.num_kv_heads),
                    ctypes.c_int(self.grid),
                    ctypes.c_int(self._part_rows),
                    out,
                    lse,
                ),
            )

    def _shares_from(self, batch: int) -> int:
        return _int_bytes(batch * self.shape.num_kv_heads * self._max_column_blocks)

    def _num_parts(self, batch: int, max_pages: int) -> int:
        if not self._chunk_pages:
            return 2 * self.grid
        # The last chunk of a request may have a single page.
        chunks = max_pages // self._chunk_pages + batch
        return chunks * self.shape.num_kv_heads * self._max_column_blocks

    def _part_bytes(self, values: int, num_parts: int) -> int:
        # Vectors follow, so the bytes are a multiple of 16.
        return _int_bytes(num_parts * self._part_rows * values)


def tail_aligned(window_k: torch.Tensor) -> bool:
    """Return True if pairs of 16-bit values of K can be loaded at once."""
    return window_k.data_ptr() % 4 == 0 and all(s % 2 == 0 for s in window_k.stride()[:3])


def verify_kernel(
    shape: AttentionShape,
    max_qo_len: int,
    batch: int,
    device: torch.device,
    *,
    may_join_separately: bool,
    is_deterministic: bool = False,
) -> VerifyKernel:
    """Return the kernel of a shape and likely number of requests."""
    if is_deterministic:
        return _verify_kernel(shape, max_qo_len, device, CHUNK_JOIN_WARPS, is_deterministic=True)
    if not may_join_separately:
        return _verify_kernel(shape, max_qo_len, device, 0)
    queries = max_qo_len * _group(shape)
    columns, blocks = columns_and_blocks(shape, queries)
    column_blocks = -(-queries // (8 * columns))
    parts = num_blocks(blocks, device) / (batch * shape.num_kv_heads * column_blocks)
    rows = parts * min(queries, 8 * columns)
    joins_separately = parts > MOST_JOINED or (parts > 1 and rows > MOST_ROWS_JOINED)
    return _verify_kernel(shape, max_qo_len, device, join_warps(parts) if joins_separately else 0)


@functools.lru_cache(maxsize=64)
def _verify_kernel(
    shape: AttentionShape,
    max_qo_len: int,
    device: torch.device,
    join_warps: int,
    *,
    is_deterministic: bool = False,
) -> VerifyKernel:
    """Return the kernel, loaded once. Kernels with equally many columns share compiled code."""
    return VerifyKernel(shape, max_qo_len, device, join_warps, is_deterministic=is_deterministic)


def verify_defines(
    shape: AttentionShape,
    columns: int,
    blocks: int,
    *,
    joins_separately: bool = False,
    chunk_pages: int = 0,
) -> dict[str, int | str]:
    """Return the constants that cuda/verify_attention.cu is compiled with. chunk_pages: pages of a
    chunk if deterministic, otherwise 0."""
    return record_defines(shape) | {
        "GROUP": _group(shape),
        "COLUMNS": columns,
        "HALVES": HALVES,
        "BLOCKS": blocks,
        "RESIDUAL_BYTES": _residual_bytes(shape),
        "MAX_BATCH": MAX_BATCH,
        "JOIN_SEPARATELY": int(joins_separately),
        "CHUNK_PAGES": chunk_pages,
    }


def join_defines(
    shape: AttentionShape, columns: int, join_warps: int, *, chunk_pages: int = 0
) -> dict[str, int | str]:
    """Return the constants that cuda/verify_join.cu is compiled with. chunk_pages: as for
    verify_defines()."""
    own = {"GROUP": _group(shape), "COLUMNS": columns, "CHUNK_PAGES": chunk_pages}
    return row_join_defines(shape, join_warps) | own


def _int_bytes(count: int) -> int:
    """Return the bytes of `count` integers, a multiple of 16 so that vectors may follow."""
    return -(-count * 4 // 16) * 16


def _group(shape: AttentionShape) -> int:
    """Return the number of query heads of a KV head."""
    return shape.num_qo_heads // shape.num_kv_heads


def columns_and_blocks(
    shape: AttentionShape, queries: int, *, is_deterministic: bool = False
) -> tuple[int, int]:
    """Return the columns of 8 queries that a block handles at once, as registers and memory allow,
    and the blocks of a multiprocessor."""
    most = 4 if shape.head_dim > 128 else 16
    possible: tuple[int, ...] = (1, 2, 4, 8, 16)
    if is_deterministic:
        possible = (most,) if most == 4 else CHUNK_COLUMNS
    columns = next(c for c in possible if 8 * c >= queries or c == most)
    while _shared_bytes(shape, columns) + BLOCK_RESERVED > MULTIPROCESSOR_SHARED:
        columns //= 2
    room = MULTIPROCESSOR_SHARED // (_shared_bytes(shape, columns) + BLOCK_RESERVED)
    return columns, min(BLOCKS_OF_COLUMNS[columns], room)


def _residual_bytes(shape: AttentionShape) -> int:
    sizes = (shape.page_size, shape.head_dim, shape.q_dtype)
    return residual_layout(shape.settings, "int8", *sizes).nbytes


def _shared_bytes(shape: AttentionShape, columns: int) -> int:
    """Return the bytes of shared memory, in the layout of cuda/verify_attention.cu."""
    anchor = anchor_layout(shape.settings, shape.page_size, shape.head_dim)
    tiles = shape.head_dim // 16
    page = anchor.nbytes + _residual_bytes(shape)
    return (
        (tiles * columns * 256 + columns * 128)  # query and running maxima
        + 2 * WARPS * columns * 256  # probabilities, twice
        + WARPS * tiles * 64  # metadata of K
        + WARPS * max(tiles // WARPS * 8, 16) * 16  # metadata of V
        + 2 * columns * 8 * 4
        + HALVES // 2 * page
        + HALVES * 8
        + 16
        + 2 * (HALVES // 2 + 2) * 4  # rows of pages to fetch
        + 4 * (MAX_BATCH + 2)
    )
