"""The portable back end: launches the Triton kernels of `jit/attention.py` and
`jit/word_attention.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvspec_kernels.jit.attention import attention_kernel, merge_kernel
from kvspec_kernels.jit.chunks import chunk_blocks
from kvspec_kernels.jit.code_tiles import TILE_TOKENS
from kvspec_kernels.jit.functions import kernel_function
from kvspec_kernels.jit.word_attention import word_attention_kernel
from kvspec_kernels.ops.attention_plan import AttentionPlan, Records, Source, Tail
from kvspec_kernels.ops.device import is_large
from kvspec_kernels.reference.codec import kernel_reference_of

# Programs per multiprocessor. More are faster for a source that needs fewer registers. An H200 with
# one query token of 16 requests takes, with three and with two: exact, 1024 tokens: 30 us and
# 35 us; anchor, 4096 tokens: 179 us and 147 us.
PROGRAMS_PER_SM: dict[Source, int] = {"anchor": 2, "int8": 3, "exact": 3}
# The same for GPUs of 99 KiB of shared memory a block, of which a multiprocessor has room for no
# more. None was measured.
SMALL_PROGRAMS_PER_SM = 2
# Values of partial outputs that a program of the merge loads at a time.
MERGE_TILE = 8192
# Stages of loops that set none of their own. More would pipeline loads through shared memory, of
# which smaller devices have 100 KB.
NUM_STAGES = 1
# Head sizes that jit/code_tiles.py takes: a group of 4 tiles must lie in one row of tiles. 256
# channels would not fit registers.
WORD_HEAD_DIMS = (64, 128)
# Query rows of a program of jit/word_attention.py, one warp. With more, registers do not hold the
# sums; with more than 8 and heads of 128, not all of them.
WORD_ROWS = 16
# Programs per multiprocessor: twice as many as registers hold, as they do not end at once. An H200
# with 16 requests of 32K tokens takes 213 us with 16 and 261 us with 8.
WORD_PROGRAMS_PER_SM = 16
# Pages that a program has in flight. With two, an H200 takes 219 us.
WORD_STAGES = 3
# Stages of the loop of jit/refined_attention.py. Loads of indices take some: 8 have 3 pages in
# flight, and 5 have 2. An H200 takes 608 us with 8 and 614 us with 5, with 16 query tokens of 16
# requests of 32K.
REFINED_STAGES = 8
# Programs per multiprocessor: twice as many as registers hold. An H200 takes 608 us with 4, 617 us
# with 2 and 623 us with 6.
REFINED_PROGRAMS_PER_SM = 4
# Tokens of the tail that a step of a program takes.
WORD_TAIL = 16
INTERPRETED = not isinstance(attention_kernel, triton.runtime.JITFunction)
TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def most_rows(head_dim: int) -> int:
    """Return the most query rows of a program. More rows take more programs, each of which reads
    the request's pages."""
    # Accumulators take at most 64 registers a thread.
    return 32 if head_dim > 128 else 64


@dataclass(frozen=True, slots=True)
class Launch:
    """Sizes of a launch. They depend on the plan with its device, never on lengths. item_units: as
    in jit/work_items.py."""

    block_m: int
    block_n: int
    block_d: int
    num_blocks: int
    num_items: int
    item_units: int
    num_warps: int
    by_words: bool

    @property
    def num_rows(self) -> int:
        """Rows of partial states of one work item and KV head."""
        return self.num_blocks * self.block_m

    @classmethod
    def of(cls, plan: AttentionPlan) -> Launch:
        by_words = decodes_words(plan)
        block_m, of_sm, num_warps = (_word_sizes if by_words else _sizes)(plan)
        # Rotated values leave fewer registers: a query is there twice.
        wide = plan.head_dim > 128 or plan.settings.triton_decode(plan.page_size).rotates
        block_n = 64 if plan.page_size % 64 == 0 and not wide else 32
        num_blocks = -(-plan.max_qo_len * plan.group // block_m)
        if plan.deterministic_pages is not None:
            item_units = chunk_blocks(block_n)
            units = plan.deterministic_pages * -(-plan.page_size // block_n)
            num_items = units // item_units + plan.batch_size
        else:
            item_units = 0
            programs = of_sm * plan.num_sms
            num_items = plan.batch_size + -(-programs // (plan.num_kv_heads * num_blocks))
        return cls(
            block_m=block_m,
            block_n=block_n,
            block_d=max(16, triton.next_power_of_2(plan.head_dim)),
            num_blocks=num_blocks,
            num_items=num_items,
            item_units=item_units,
            num_warps=num_warps,
            by_words=by_words,
        )


def _word_sizes(plan: AttentionPlan) -> tuple[int, int, int]:
    """Return (query rows of a program, programs per multiprocessor, warps) of
    jit/word_attention.py."""
    rows = plan.max_qo_len * plan.group
    return max(8, triton.next_power_of_2(rows)), WORD_PROGRAMS_PER_SM, 1


def _sizes(plan: AttentionPlan) -> tuple[int, int, int]:
    """Return (query rows of a program, programs per multiprocessor, warps) of jit/attention.py."""
    large, most = is_large(plan.device), most_rows(plan.head_dim)
    # Without Hopper's instructions, rows of 128 values take more registers than 4 warps have.
    num_warps = 8 if plan.head_dim > 128 or (plan.head_dim > 64 and not large) else 4
    of_sm = PROGRAMS_PER_SM[plan.source] if large else SMALL_PROGRAMS_PER_SM
    if large and decodes_refined(plan):
        # Fewer rows than a warp group multiplies are slower: an H200 takes 788 us for 16 rows, and
        # 610 us for 64.
        return most, REFINED_PROGRAMS_PER_SM, num_warps
    if plan.deterministic_pages is not None:
        # Another tile could compile to instructions that add in another order.
        return most, of_sm, num_warps
    rows = plan.max_qo_len * plan.group
    return min(max(16, triton.next_power_of_2(rows)), most), of_sm, num_warps


class TritonAttention:
    """Back end that runs one plan. `workspace` holds the partial states in fp32."""

    def __init__(self, plan: AttentionPlan, workspace: torch.Tensor) -> None:
        if not INTERPRETED and plan.device.type != "cuda":
            raise ValueError(
                f"indptr must be on a CUDA device, got {plan.device}: to run the kernels on a CPU, "
                "set TRITON_INTERPRET=1 before triton is imported, and call patch_interpreter() of "
                "kvspec_testkit.kernels.interpreter"
            )
        self._plan = plan
        sizes = Launch.of(plan)
        num_states = sizes.num_items * plan.num_kv_heads * sizes.num_rows
        states = workspace[: self.workspace_nbytes(plan)].view(torch.float32)
        num_values = num_states * plan.head_dim
        self._attention_grid = (sizes.num_items, plan.num_kv_heads, sizes.num_blocks)
        self._num_warps = sizes.num_warps
        self._by_words = sizes.by_words
        # Arguments of both kernels.
        self._shared = {
            "partial_out_ptr": states[:num_values],
            "partial_lse_ptr": states[num_values:],
            "indptr_ptr": plan.indptr,
            "last_page_len_ptr": plan.last_page_len,
            "qo_indptr_ptr": plan.qo_indptr,
            "batch_size": plan.batch_size,
            "num_items": sizes.num_items,
            "num_rows": sizes.num_rows,
            "PAGE_SIZE": plan.page_size,
            "HEAD_DIM": plan.head_dim,
            "NUM_KV_HEADS": plan.num_kv_heads,
            "GROUP": plan.group,
            "ROWS": plan.max_qo_len if plan.qo_indptr is None else 0,
            "DTYPE": TRITON_DTYPES[plan.q_dtype],
            "INTERPRET": INTERPRETED,
            "BLOCK_N": sizes.block_n,
            "BLOCK_D": sizes.block_d,
            "BLOCK_B": max(16, triton.next_power_of_2(plan.batch_size)),
            "ITEM_UNITS": sizes.item_units,
        }
        block_g = triton.next_power_of_2(plan.group)
        block_s = max(1, MERGE_TILE // (block_g * sizes.block_d))
        self._merge = {"BLOCK_G": block_g, "BLOCK_S": block_s}
        self._attention = {
            "indices_ptr": plan.indices,
            "LISTS_BY_HEAD": plan.has_lists_by_head,
            "stride_index": plan.indices.stride(0),
            "scale_log2": plan.sm_scale * math.log2(math.e),
            "BLOCK_M": sizes.block_m,
            "FINITE_MAX": torch.finfo(plan.q_dtype).max,
            **(_word_constants if sizes.by_words else _code_constants)(plan),
        }

    @staticmethod
    def workspace_nbytes(plan: AttentionPlan) -> int:
        sizes = Launch.of(plan)
        return sizes.num_items * plan.num_kv_heads * sizes.num_rows * (plan.head_dim + 1) * 4

    def run(
        self,
        q: torch.Tensor,
        records: Records,
        tail: Tail | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write `out` and `lse`. The arguments are already checked against the plan."""
        anchors, residuals, residual_slots = records
        tail_k, tail_v, *tail_index = tail or (None,) * 5
        tail_lens = tail_index[-1]
        inputs = {
            "q_ptr": q,
            "anchors_ptr": anchors,
            "tail_k_ptr": tail_k,
            "tail_v_ptr": tail_v,
            "tail_indptr_ptr": tail_index[0],
            "tail_indices_ptr": tail_index[1],
            "tail_lens_ptr": tail_lens,
            **_strides("q", ("token", "head"), q),
            **_strides("anchor", ("page", "head"), anchors),
            **_strides("k", ("slot", "token", "head"), tail_k),
            **_strides("v", ("slot", "token", "head"), tail_v),
        }
        if not self._by_words:
            inputs |= {"residuals_ptr": residuals, "residual_slots_ptr": residual_slots}
            inputs |= _strides("residual", ("slot", "head"), residuals)
        launch = attention_kernel[self._attention_grid]
        if self._by_words:
            launch = word_attention_kernel[self._attention_grid]
        launch(
            **inputs,
            **self._shared,
            **self._attention,
            num_warps=self._num_warps,
            num_stages=NUM_STAGES,
        )
        merge_kernel[(len(q), self._plan.num_kv_heads)](
            out_ptr=out,
            lse_ptr=lse,
            tail_lens_ptr=tail_lens,
            **_strides("out", ("token", "head"), out),
            **_strides("lse", ("token", "head"), lse),
            **self._shared,
            **self._merge,
            num_warps=4,
        )


def _strides(name: str, dimensions: tuple[str, ...], tensor: torch.Tensor | None) -> dict[str, int]:
    """Return kernel arguments stride_<name>_<dimension>, all 0 if there is no tensor."""
    return {
        f"stride_{name}_{dimension}": 0 if tensor is None else tensor.stride(index)
        for index, dimension in enumerate(dimensions)
    }


def _code_values(plan: AttentionPlan) -> torch.Tensor | None:
    """Return the table of values of codes, or of codes with corrections for int8. None for exact,
    and where the kernel computes values."""
    if plan.source == "exact":
        return None
    reference = kernel_reference_of(plan.settings)
    return reference.code_values(
        plan.settings, plan.head_dim, plan.device, refined=plan.source == "int8"
    )


def decodes_refined(plan: AttentionPlan) -> bool:
    """Return True if jit/refined_attention.py attends to the records. Anchors of 2 and of 4 bits
    take the same path, for the same bits."""
    decode = plan.settings.triton_decode(plan.page_size)
    tile, pairs = TILE_TOKENS.value, 2 * TILE_TOKENS.value
    # Metadata is loaded 4 bytes at a time.
    names = [f"{part}_{name}" for part in "kv" for name in (decode.scale, decode.offset)]
    return (
        plan.source == "int8"
        and plan.sm_scale > 0
        and decode.is_affine
        and plan.settings.anchor_bits in (2, 4)
        and all(plan.anchor_layout[name].offset % 4 == 0 for name in names)
        and (plan.page_size == tile or plan.page_size % pairs == 0)
        and decode.chunks[0] % tile == 0
        and plan.head_dim in WORD_HEAD_DIMS
        and plan.q_dtype == torch.bfloat16
    )


def decodes_words(plan: AttentionPlan) -> bool:
    """Return True if jit/word_attention.py attends to the records."""
    decode = plan.settings.triton_decode(plan.page_size)
    return (
        plan.source == "anchor"
        and plan.has_past
        and plan.max_qo_len * plan.group <= WORD_ROWS
        and decode.is_affine
        and plan.settings.anchor_bits == 4
        and plan.page_size % TILE_TOKENS.value == 0
        and decode.chunks[0] % TILE_TOKENS.value == 0
        and plan.head_dim in WORD_HEAD_DIMS
        and plan.q_dtype != torch.float32
    )


def _word_constants(plan: AttentionPlan) -> dict[str, Any]:
    """Return the arguments that only jit/word_attention.py takes, and those of both."""
    constants = {"STAGES": WORD_STAGES, "TAIL_N": WORD_TAIL}
    return constants | _anchor_constants(plan)


def _code_constants(plan: AttentionPlan) -> dict[str, Any]:
    """Return the arguments that only jit/attention.py takes, and those of both."""
    decode = plan.settings.triton_decode(plan.page_size)
    # Drafts read no residual, and some codecs have none of the target int8.
    k_residual, v_residual = 0, 0
    if plan.source != "anchor":
        upgrade = "bits" if plan.source == "exact" else "codes"
        k_residual, v_residual = (plan.residual_layout[f"{part}_{upgrade}"].offset for part in "kv")
    constants: dict[str, Any] = {
        "table_ptr": _code_values(plan),
        "SOURCE": plan.source,
        "REFINED_STAGES": REFINED_STAGES if decodes_refined(plan) else 0,
        "DECODE": kernel_function(decode.function),
        "ROTATES": decode.rotates and plan.source != "exact",
        "ANCHOR_BITS": plan.settings.anchor_bits,
        "V_CHUNK": decode.chunks[1],
        "K_RESIDUAL": k_residual,
        "V_RESIDUAL": v_residual,
    }
    return constants | _anchor_constants(plan)


def _anchor_constants(plan: AttentionPlan) -> dict[str, int]:
    """Return the chunk size of K and byte offsets of the fields of an anchor record."""
    anchor = plan.anchor_layout
    decode = plan.settings.triton_decode(plan.page_size)
    constants = {"K_CHUNK": decode.chunks[0]}
    for part in ("k", "v"):
        name = part.upper()
        constants[f"{name}_CODES"] = anchor[f"{part}_codes"].offset
        constants[f"{name}_OFFSET"] = anchor[f"{part}_{decode.offset}"].offset
        constants[f"{name}_SCALE"] = anchor[f"{part}_{decode.scale}"].offset
    return constants
