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
    # A page is a record here, of one layer and head.
    unpacker = Unpacker(raw[:, None, None], anchors[:, None, None], anchor_layout, layout)
    unpacker(rows, rows, records[:, None, None], raw_v, ranks[:, None, None])
    return raw


class Unpacker:
    """Function that unpacks records beside rows of one pool into rows of another. The pools are
    checked once, as a fetch calls this for each layer."""

    def __init__(
        self,
        raw: torch.Tensor,
        anchors: torch.Tensor,
        anchor_layout: RecordLayout,
        layout: PackedLayout,
    ) -> None:
        """raw: [T, layers, heads, 2 * layout.raw_nbytes] uint8. anchors: [S, layers, heads,
        anchor_layout.nbytes] uint8. Errors are those of pack()."""
        (k_fields, v_fields), constants = _constants(anchor_layout, layout, WARPS)
        self._layers, self._heads = anchors.shape[1:3]
        inner = (self._layers, self._heads)
        _check(raw, 2 * layout.raw_nbytes, anchors, "raw", inner)
        _check(anchors, anchor_layout.nbytes, anchors, "anchors", inner)
        self._layout, self._like, self._segments = layout, anchors, constants["SEGMENTS"]
        strides = {
            f"stride_{name}_{what}": stride // WORD_BYTES
            for name, pool in (("anchor", anchors), ("raw", raw))
            for what, stride in zip(("row", "layer", "head"), pool.stride(), strict=False)
        }
        self._arguments = {
            "anchors_ptr": anchors.view(torch.int32),
            "raw_ptr": raw.view(torch.int32),
            "K_FIELDS": k_fields,
            "V_FIELDS": v_fields,
            "HEADS": self._heads,
            **strides,
            **constants,
        }

    def __call__(
        self,
        raw_rows: torch.Tensor,
        anchor_rows: torch.Tensor,
        records: torch.Tensor,
        raw_v: torch.Tensor,
        ranks: torch.Tensor,
        first_layer: int = 0,
    ) -> None:
        """Set the n layers from first_layer on of raw[raw_rows[i]] to unpack() of records[i] beside
        anchors[anchor_rows[i]], in place.

        records: [N, n, heads, layout.nbytes] uint8, with equal steps between records. raw_rows,
        anchor_rows: [N] integers, contiguous; raw_rows distinct. ranks: [N, layers, heads]
        integers; heads are neighbours. Allocates nothing, and does not wait for the device. Row
        numbers are not checked. raw_v and errors are those of unpack().
        """
        num_pages, num_layers, num_heads = records.shape[:3]
        _check(records, self._layout.nbytes, self._like, "records", (num_layers, self._heads))
        _check(raw_v, self._layout.raw_nbytes, self._like, "raw_v")
        _check_lengths(records, raw_rows=raw_rows, anchor_rows=anchor_rows, ranks=ranks)
        assert 0 <= first_layer <= self._layers - num_layers, "the pools must have these layers"
        assert ranks.shape[1:] == (self._layers, num_heads), "ranks must be [N, layers, heads]"
        assert ranks.stride(2) == 1 or num_heads == 1, "ranks of heads must be neighbours"
        num_rows = num_pages * num_layers * num_heads * self._layout.num_segments
        if not num_rows:
            return
        by_record = records.flatten(0, 2)
        assert by_record.data_ptr() == records.data_ptr(), "steps between records must be equal"
        unpack_kernel[(triton.cdiv(num_rows, self._segments), 2)](
            anchor_rows_ptr=anchor_rows,
            records_ptr=by_record.view(torch.int32),
            raw_v_ptr=raw_v.view(torch.int32),
            ranks_ptr=ranks,
            raw_rows_ptr=raw_rows,
            num_rows=num_rows,
            num_layers=num_layers,
            first_layer=first_layer,
            num_raw_v=len(raw_v),
            stride_record=by_record.stride(0) // WORD_BYTES,
            stride_raw_v=raw_v.stride(0) // WORD_BYTES,
            stride_rank_row=ranks.stride(0),
            stride_rank_layer=ranks.stride(1),
            **self._arguments,
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
