"""Pack raw residual records of the target exact, and unpack them (`packed_format.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton

from kvspec_kernels.formats import RECORD_ALIGNMENT, FormatError, RecordLayout
from kvspec_kernels.jit.pack_exact import pack_kernel
from kvspec_kernels.jit.unpack_exact import unpack_kernel
from kvspec_kernels.ops.triton_attention import INTERPRETED
from kvspec_kernels.packed_format import PackedLayout

TRITON_DTYPES = {torch.bfloat16: triton.language.bfloat16, torch.float16: triton.language.float16}
# Tokens of a tile of codes, which share a scale of K.
TILE = 16
WORD_BYTES = 4
# The interpreter is quick with few programs.
WARPS = 512 if INTERPRETED else 4
RUN_VALUES = 16
# Registers of a thread: 16 warps on a multiprocessor, and nothing in local memory.
MAX_REGISTERS = 128


def pack(
    anchors: torch.Tensor, raw: torch.Tensor, anchor_layout: RecordLayout, layout: PackedLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack raw residual records beside their anchors. Return the packed records, [R, layout.nbytes]
    uint8, with the bytes of reference/packed_exact.py, and which of them fit, [R] bool.

    anchors: [R, anchor_layout.nbytes] uint8, of uniform4 with 4 bits. raw: [R, 2 *
    layout.raw_nbytes] uint8. Rows are contiguous and start at multiples of 16 bytes.
    A record that does not fit holds raw K. The caller must keep its V.
    Allocates the results, and does not wait for the device. Raises FormatError for an anchor layout
    without such records, and ValueError for tensors that do not fit.
    """
    fields_of_parts, constants = _constants(anchor_layout, layout, WARPS)
    _check(anchors, anchor_layout.nbytes, anchors, "anchors")
    _check(raw, 2 * layout.raw_nbytes, anchors, "raw")
    _check_lengths(anchors, raw=raw)
    records = anchors.new_empty(len(raw), layout.nbytes)
    used = anchors.new_empty(len(raw), dtype=torch.int32)
    segments = min(constants["SEGMENTS"], 1 << (layout.num_segments - 1).bit_length())
    num_records = constants["SEGMENTS"] // segments
    # V goes behind K.
    for part, fields in enumerate(fields_of_parts) if len(raw) else ():
        pack_kernel[(triton.cdiv(len(raw), num_records),)](
            anchors_ptr=anchors.view(torch.int32),
            raw_ptr=raw.view(torch.int16),
            records_ptr=records.view(torch.int32),
            used_ptr=used,
            num_records=len(raw),
            stride_anchor=anchors.stride(0) // WORD_BYTES,
            stride_raw=raw.stride(0) // 2,
            stride_record=layout.nbytes // WORD_BYTES,
            PART=part,
            FIELDS=fields,
            RECORDS=num_records,
            **constants | {"SEGMENTS": segments},
        )
    return records, used <= layout.body_words


def unpack(
    anchors: torch.Tensor,
    records: torch.Tensor,
    raw_v: torch.Tensor,
    anchor_layout: RecordLayout,
    layout: PackedLayout,
    ranks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Unpack records of pack() beside the same anchors. Return the raw records, [R, 2 *
    layout.raw_nbytes] uint8.

    raw_v: [U, layout.raw_nbytes] uint8, raw V of records that do not fit. ranks: [R] integers,
    contiguous: its row for each of them, counted from 1; others' are not used. None: rows are in
    the order of records. Where a row is missing, or a rank is 0, V is zero. A damaged record gives
    a meaningless page, and reads no other record. Other arguments, allocation and errors are those
    of pack().
    """
    _check(anchors, anchor_layout.nbytes, anchors, "anchors")
    _check(records, layout.nbytes, anchors, "records")
    _check_lengths(anchors, records=records)
    raw = anchors.new_empty(len(records), 2 * layout.raw_nbytes)
    if ranks is None:
        fits = records[:, :2].contiguous().view(torch.int16)[:, 0] == 1
        ranks = (~fits).cumsum(0)
    _check_lengths(anchors, ranks=ranks)
    rows = torch.arange(len(records), device=anchors.device)
    pools = [each[:, None, None] for each in (raw, anchors, records)]
    unpack_into(
        pools[0], rows, pools[1], rows, pools[2], raw_v, ranks[:, None, None], anchor_layout, layout
    )
    return raw


def unpack_into(
    raw: torch.Tensor,
    raw_rows: torch.Tensor,
    anchors: torch.Tensor,
    anchor_rows: torch.Tensor,
    records: torch.Tensor,
    raw_v: torch.Tensor,
    ranks: torch.Tensor,
    anchor_layout: RecordLayout,
    layout: PackedLayout,
) -> None:
    """Set raw[raw_rows[i]] to unpack() of records[i] beside anchors[anchor_rows[i]], in place.

    raw: [T, layers, heads, 2 * layout.raw_nbytes] uint8. anchors: [S, layers, heads,
    anchor_layout.nbytes] uint8. records: [N, layers, heads, layout.nbytes] uint8, with equal steps
    between records. raw_rows, anchor_rows: [N] integers, contiguous; raw_rows distinct. ranks: [N,
    layers, heads] integers of equal steps between heads, of 1.
    Allocates nothing. Row numbers are not checked. Other arguments and errors are those of
    unpack().
    """
    fields_of_parts, constants = _constants(anchor_layout, layout, WARPS)
    num_pages, *inner, _ = records.shape
    for name, pool, nbytes in (
        ("raw", raw, 2 * layout.raw_nbytes),
        ("anchors", anchors, anchor_layout.nbytes),
        ("records", records, layout.nbytes),
    ):
        _check(pool, nbytes, anchors, name, inner)
    _check(raw_v, layout.raw_nbytes, anchors, "raw_v")
    _check_lengths(records, raw_rows=raw_rows, anchor_rows=anchor_rows, ranks=ranks)
    num_layers, num_heads = inner
    num_rows = num_pages * num_layers * num_heads * layout.num_segments
    if not num_rows:
        return
    by_record = records.flatten(0, 2)
    assert by_record.data_ptr() == records.data_ptr(), "steps between records must be equal"
    assert ranks.shape[1:] == (num_layers, num_heads), f"ranks must be [N, {inner}]"
    assert ranks.stride(2) == 1 or num_heads == 1, "ranks of heads must be neighbours"
    for part, fields in enumerate(fields_of_parts):
        unpack_kernel[(triton.cdiv(num_rows, constants["SEGMENTS"]),)](
            anchors_ptr=anchors.view(torch.int32),
            anchor_rows_ptr=anchor_rows,
            records_ptr=by_record.view(torch.int32),
            raw_v_ptr=raw_v.view(torch.int32),
            ranks_ptr=ranks,
            raw_ptr=raw.view(torch.int32),
            raw_rows_ptr=raw_rows,
            num_rows=num_rows,
            num_layers=num_layers,
            num_raw_v=len(raw_v),
            stride_anchor_row=anchors.stride(0) // WORD_BYTES,
            stride_anchor_layer=anchors.stride(1) // WORD_BYTES,
            stride_anchor_head=anchors.stride(2) // WORD_BYTES,
            stride_record=by_record.stride(0) // WORD_BYTES,
            stride_raw_v=raw_v.stride(0) // WORD_BYTES,
            stride_rank_row=ranks.stride(0),
            stride_rank_layer=ranks.stride(1),
            stride_raw_row=raw.stride(0) // WORD_BYTES,
            stride_raw_layer=raw.stride(1) // WORD_BYTES,
            stride_raw_head=raw.stride(2) // WORD_BYTES,
            PART=part,
            FIELDS=fields,
            HEADS=num_heads,
            **constants,
        )


@cache
def _constants(
    anchor_layout: RecordLayout, layout: PackedLayout, warps: int
) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Return what follows from the layouts for both kernels: FIELDS of K and of V, and other
    keyword arguments."""
    fields = {field.name: field for field in anchor_layout.fields}
    sizes = (layout.page_size, layout.head_dim)
    names = [f"{part}_{name}" for part in "kv" for name in ("codes", "scale", "zero")]
    if list(fields) != names or fields["k_codes"].shape != (layout.num_values // 2,):
        raise FormatError(
            f"a packed residual of pages of {sizes[0]} tokens and heads of {sizes[1]} needs "
            f"anchors of uniform4 with 4 bits and these sizes, got fields {anchor_layout.fields}"
        )
    k_group = layout.page_size // fields["k_scale"].shape[0]
    if k_group % TILE:
        raise FormatError(f"kernels need k_group in multiples of {TILE} tokens, got {k_group}")
    words = tuple(field.offset // WORD_BYTES for field in fields.values())
    return [words[:3], words[3:]], {
        "PAGE_SIZE": layout.page_size,
        "HEAD_DIM": layout.head_dim,
        "TILES": layout.segment_values // TILE**2,
        "NUM_SEGMENTS": layout.num_segments,
        "SEGMENTS": 32 * warps * RUN_VALUES // layout.segment_values,
        "K_GROUP": k_group,
        "DTYPE": TRITON_DTYPES[layout.dtype],
        "MANTISSA_BITS": layout.mantissa_bits,
        "BODY_WORDS": layout.body_words,
        "INTERPRET": INTERPRETED,
        "num_warps": warps,
        "maxnreg": MAX_REGISTERS,
        # The reference rounds a product before it adds to it.
        "enable_fp_fusion": False,
    }


def _check(
    rows: torch.Tensor, nbytes: int, like: torch.Tensor, name: str, inner: Sequence[int] = ()
) -> None:
    """inner: sizes between the first dimension and that of bytes."""
    shape = (*inner, nbytes)
    if rows.dtype != torch.uint8 or rows.ndim < 2 or rows.shape[1:] != shape:
        sizes = ", ".join(map(str, shape))
        raise ValueError(f"{name} must be uint8 [records, {sizes}], got {_of(rows)}")
    if rows.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {_of(rows)}")
    starts = (rows.data_ptr(), *rows.stride()[:-1])
    if len(rows) and (rows.stride(-1) != 1 or any(start % RECORD_ALIGNMENT for start in starts)):
        raise ValueError(
            f"{name} must have contiguous rows that start at multiples of {RECORD_ALIGNMENT} "
            f"bytes, got strides {rows.stride()}"
        )


def _check_lengths(of: torch.Tensor, **others: torch.Tensor) -> None:
    for name, rows in others.items():
        if len(rows) != len(of):
            raise ValueError(f"{name} must have {len(of)} rows, got {_of(rows)}")


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
