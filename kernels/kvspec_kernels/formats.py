"""Byte layouts of encoded pages: the one place where codecs, kernels and transports agree.

A *record* is one page of one KV head and holds its K part and its V part. A page has two records.
The anchor record is always in GPU memory and suffices for drafts. The residual record upgrades the
anchor to the target precision; it is moved and evicted separately. P: page size in tokens, D: head
size, B: bits of an anchor code, 4 or 2. All numbers are little-endian.

    anchor record, log4                            anchor record, uniform4
    +-----------+------------------+-------+       +---------+------------------+-------+
    | scale_base| [2] (K, V)       | int16 |       | k_codes | [P * D * B / 8]  | uint8 |
    | unused    | [12], zero       | uint8 |       | k_scale | [P/k_group, D]   | bf16  |
    | k_codes   | [P * D * B / 8]  | uint8 |       | k_zero  | [P/k_group, D]   | bf16  |
    | k_centre  | [P/k_chunk, D]   | bf16  |       | v_codes | [P * D * B / 8]  | uint8 |
    | k_scale   | [P/k_chunk, D]   | uint8 |       | v_scale | [P]              | bf16  |
    | v_codes   | [P * D * B / 8]  | uint8 |       | v_zero  | [P]              | bf16  |
    | v_centre  | [P/v_chunk, D]   | bf16  |       +---------+------------------+-------+
    | v_scale   | [P/v_chunk, D]   | uint8 |
    +-----------+------------------+-------+

    residual record, target int8                   residual record, target exact
    +-----------+------------------+-------+       +---------+------------------+-------+
    | k_codes   | [P * D / 2]      | uint8 |       | k_bits  | [P, D] row-major | KV    |
    | k_rest    | [P * D / 4], B=2 | uint8 |       | v_bits  | [P, D] row-major | dtype |
    | v_codes   | [P * D / 2]      | uint8 |       +---------+------------------+-------+
    | v_rest    | [P * D / 4], B=2 | uint8 |
    +-----------+------------------+-------+

Codes lie in the order in which a warp's registers hold the left operand of a 16 x 16 x 8 matrix
instruction. A kernel reads them straight into place, without shuffles or transpositions. The left
operand is K (rows: tokens, columns: channels) or V transposed (rows: channels, columns: tokens).
The operand is cut into tiles of 16 x 16, row of tiles after row of tiles. A tile is 32 words of 32
bits, one for each lane, and each word holds 8 codes. Lane 4 g + t holds codes with these numbers:

    column   2t  2t+1  2t+8  2t+9
    row g     0     1     4     5
    row g+8   2     3     6     7

Tiles are stored in groups of 4, or of 2 where their number is no multiple of 4. A group is the
words [lane][tile of the group]: one 16-byte load gives a lane its part of 4 tiles.

In a log4 anchor of B = 4, code 2 r + h has its sign (1: negative) in bit 15 - 4 r + 16 h of the
word. Its magnitude is in the three bits from bit (4 - 4 r + 16 h) mod 32 on. After a rotation left
by 4 r and a mask, both halves of the word hold the sign and low bits of an fp16 number. With one
more bit set, the halves are the denormals +-(16 m + 1) * 2^-24: the values up to their scale.

In uniform4's anchors and both codecs' corrections, even codes 0, 2, 4, 6 are in nibbles 0 to 3 and
odd codes in nibbles 4 to 7. One mask leaves two codes, one in each half of a register. uniform4's
anchor nibbles are unsigned, corrections are in two's complement.

With B = 2 a 4-bit code u, numbered in the order of values, is cut in two: u >> 2 in the anchor,
u & 3 in k_rest and v_rest. In log4, u is 8 + m for magnitude m, and 7 - m if negative. In both
codecs, both halves lie in *pairs* of neighbouring tiles 2 j and 2 j + 1 of a row of tiles. A pair
is 32 words of 8 nibbles, even nibbles first as above. The low two bits of a nibble are the code of
tile 2 j at that position, the high two bits that of tile 2 j + 1. Pairs are numbered and grouped
like tiles.

Metadata lies in lane order too. Metadata of columns (K per channel) is stored as [t][tile of the
row][columns 2t, 2t+1, 2t+8, 2t+9]. Metadata of rows (V) is stored as [g][tile of the column][rows
g, g+8]. V's metadata is per channel in log4. In uniform4 it is per token, and scales the rows of
the product of K and Q.

K's fields come before V's. Each part of an anchor starts at a multiple of 16 bytes, so that a
kernel can fetch K and V separately. Every record is padded with zero bytes to a multiple of 16.

The codecs of other papers (kivi, kvquant, rotatekv, turboquant) store codes and metadata row by
row, codes in the order of tokens and channels (`reference/bit_packing.py`). Their declarations list
the fields. They have residuals of the target exact only.

log4 scales are 12-bit floats: the leading bits (8 exponent, 4 mantissa) of a positive fp32. A
record stores the smallest 12-bit pattern that it needs as its base. Each scale is an 8-bit offset
from the base: scale = bitcast_fp32((base + offset) << 19).

`exact` keeps the raw bits of K and V rather than a correction. A correction restores every bit only
if encoder and decoder round the anchor's value alike, and devices differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

import torch

from kvspec_kernels.codecs.fields import (
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    MAX_PAGE_SIZE,
    MIN_HEAD_DIM,
    PAGE_STEP,
    RECORD_ALIGNMENT,
    DTypeName,
    FieldSpec,
    FormatError,
    check_sizes,
    exact_fields,
    record_bytes,
)
from kvspec_kernels.codecs.log4 import Log4Settings
from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.codecs.uniform4 import Uniform4Settings

__all__ = [
    "EXACT_DTYPES",
    "HEAD_DIM_STEP",
    "MAX_HEAD_DIM",
    "MAX_PAGE_SIZE",
    "MIN_HEAD_DIM",
    "PAGE_STEP",
    "RECORD_ALIGNMENT",
    "TWO_BIT_MIDDLE",
    "TWO_BIT_STEP",
    "CodecSpec",
    "Field",
    "FormatError",
    "Log4Settings",
    "RecordLayout",
    "Target",
    "Uniform4Settings",
    "anchor_layout",
    "check_sizes",
    "residual_layout",
]

EXACT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# A 2-bit code c decodes to (2 c - 3) TWO_BIT_STEP / top in log4 and to 4 c + TWO_BIT_MIDDLE in
# uniform4, in units of the scale. Both are in or near the middle of its 4-bit values.
TWO_BIT_STEP = 28
TWO_BIT_MIDDLE = 1.5

Target = Literal["exact", "int8"]


@dataclass(frozen=True, slots=True)
class Field:
    """One array inside a record: `nbytes` bytes from byte `offset` on."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, records: torch.Tensor) -> torch.Tensor:
        """Return this field of uint8 records [..., nbytes] as a view [..., *shape] `dtype`.

        The records' last dimension must be contiguous, and their other strides multiples of 16.
        """
        raw = records[..., self.offset : self.offset + self.nbytes]
        return torch.unflatten(raw.view(self.dtype), -1, self.shape)


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Fields of a record in byte order; `nbytes` includes the padding at the end."""

    fields: tuple[Field, ...]
    nbytes: int

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def empty_records(self, leading: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Return new records [*leading, nbytes] uint8, all bytes zero."""
        return torch.zeros((*leading, self.nbytes), dtype=torch.uint8, device=device)


def anchor_layout(spec: CodecSpec, page_size: int, head_dim: int) -> RecordLayout:
    """Return the layout of an anchor record. Raises FormatError for sizes that have none."""
    check_sizes(page_size, head_dim)
    return _pack(spec.anchor_fields(page_size, head_dim))


def residual_layout(
    spec: CodecSpec, target: Target, page_size: int, head_dim: int, kv_dtype: torch.dtype
) -> RecordLayout:
    """Return the layout of a residual record. All codecs share that of the target exact.

    Raises FormatError as anchor_layout does, for a `kv_dtype` other than fp32, bf16 and fp16, for
    an unknown target, and for the target int8 of a codec that defines none.
    """
    # A record without an anchor has no residual either.
    anchor_layout(spec, page_size, head_dim)
    if kv_dtype not in EXACT_DTYPES:
        raise FormatError(
            f"KV dtype must be one of {', '.join(map(str, EXACT_DTYPES))}, got {kv_dtype}"
        )
    if target == "int8":
        return _pack(spec.correction_fields(page_size, head_dim))
    if target == "exact":
        name = str(kv_dtype).removeprefix("torch.")
        return _pack(exact_fields(page_size, head_dim, cast("DTypeName", name)))
    raise FormatError(f"target must be exact or int8, got {target!r}")


def _pack(specs: Iterable[FieldSpec]) -> RecordLayout:
    specs = tuple(specs)
    fields: list[Field] = []
    offset = 0
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        assert offset % dtype.itemsize == 0, (spec.name, offset)
        fields.append(Field(spec.name, offset, spec.shape, dtype))
        offset += fields[-1].nbytes
    return RecordLayout(tuple(fields), record_bytes(specs))
