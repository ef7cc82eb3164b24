"""Fields of a record, their bytes, and the allowed page and head sizes. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

PAGE_STEP = 32
MAX_PAGE_SIZE = 256
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 16
RECORD_ALIGNMENT = 16
# Tokens, and channels, of a tile of codes.
TILE = 16

DTypeName = Literal["uint8", "int8", "int16", "bfloat16", "float16", "float32"]
ITEM_BYTES: dict[DTypeName, int] = {
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}


class FormatError(ValueError):
    """Page size, head size, dtype or parameter without a record layout. The message names what is
    allowed."""


class FieldSpec(NamedTuple):
    """One array inside a record. Fields follow one another without gaps. Each must start at a
    multiple of its item's bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: DTypeName

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def record_bytes(fields: Iterable[FieldSpec]) -> int:
    """Return the bytes of a record of these fields, with the padding at its end."""
    return -(-sum(field.nbytes for field in fields) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def check_sizes(page_size: int, head_dim: int) -> None:
    """Raise FormatError unless pages and heads of these sizes have layouts."""
    if not (PAGE_STEP <= page_size <= MAX_PAGE_SIZE and page_size % PAGE_STEP == 0):
        raise FormatError(
            f"page size must be a multiple of {PAGE_STEP} from {PAGE_STEP} to {MAX_PAGE_SIZE}, "
            f"got {page_size}"
        )
    if not (MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_STEP == 0):
        raise FormatError(
            f"head size must be a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to "
            f"{MAX_HEAD_DIM}, got {head_dim}"
        )


def check_anchor_bits(anchor_bits: int, choices: tuple[int, ...]) -> None:
    """Raise FormatError unless anchor_bits is one of `choices`, which are two or more."""
    if anchor_bits not in choices:
        *others, last = map(str, choices)
        raise FormatError(f"anchor_bits must be {', '.join(others)} or {last}, got {anchor_bits!r}")


def num_chunks(page_size: int, chunk: int, name: str) -> int:
    """Return the number of chunks of a page. Raises FormatError, with the name of the parameter,
    unless chunks fill the page."""
    if chunk < 1 or page_size % chunk:
        allowed = [c for c in (16, 32, 64, 128, 256) if page_size % c == 0]
        raise FormatError(
            f"{name} must divide the page size {page_size} (for example {allowed}), got {chunk}"
        )
    return page_size // chunk


def code_bytes(page_size: int, head_dim: int, bits: int) -> tuple[int]:
    """Return the shape of a field that holds a code of `bits`, 4 or 2, for each element of K or of
    V, in tiles. Raises FormatError for heads that 2-bit codes do not fill."""
    if bits == 2 and head_dim % 32:
        # A pair of tiles of K spans 32 channels.
        raise FormatError(f"head size must be a multiple of 32 for anchor_bits 2, got {head_dim}")
    return (page_size * head_dim * bits // 8,)


def code_rows(page_size: int, head_dim: int, bits: int) -> tuple[int, int]:
    """Return the shape of a field that holds a code of `bits` for each element of K or of V, token
    after token: bytes of kvspec_kernels.reference.bit_packing."""
    return (page_size, head_dim * bits // 8)


def hadamard_block(head_dim: int) -> int:
    """Return the channels of a block of a head's Hadamard rotation: the largest power of two that
    divides the head size."""
    return head_dim & -head_dim


def eight_bit_corrections(page_size: int, head_dim: int, anchor_bits: int) -> tuple[FieldSpec, ...]:
    """Return fields that upgrade anchor codes to 8 bits: 4-bit corrections, and for 2-bit anchors
    the two low bits of the 4-bit code."""
    widths = {"codes": 4} if anchor_bits == 4 else {"codes": 4, "rest": 4 - anchor_bits}
    return tuple(
        FieldSpec(f"{part}_{name}", code_bytes(page_size, head_dim, bits), "uint8")
        for part in ("k", "v")
        for name, bits in widths.items()
    )


def exact_fields(page_size: int, head_dim: int, kv_dtype: DTypeName) -> tuple[FieldSpec, ...]:
    """Return the fields of the residual record that holds every bit of K and V."""
    values = (page_size, head_dim)
    return (FieldSpec("k_bits", values, kv_dtype), FieldSpec("v_bits", values, kv_dtype))
