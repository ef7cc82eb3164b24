"""Byte layouts of encoded pages: the one place where codecs, kernels and transports agree.

A *record* is one page of one KV head and holds its K part and its V part. A page has two records:
the anchor record (always in GPU memory, enough to draft) and the residual record (upgrades the
anchor to the target precision; it travels and is evicted on its own). P: page size in tokens,
D: head size, B: bits of an anchor code, 4 or 2; little-endian.

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

Codes lie in the order in which the registers of a warp hold the left operand of a 16 x 16 x 8
matrix instruction, so that a kernel reads them straight into place: no shuffle, no transposition.
The left operand is K (rows: tokens, columns: channels) and V transposed (rows: channels, columns:
tokens). It is cut into tiles of 16 x 16, row of tiles after row of tiles; a tile is 32 words of 32
bits, one a lane, and each word holds 8 codes. Lane 4 g + t holds, with these numbers:

    column   2t  2t+1  2t+8  2t+9
    row g     0     1     4     5
    row g+8   2     3     6     7

Tiles are stored in groups of 4 (of 2 where a page has no multiple of 4): the words [lane][tile of
the group], so that one 16-byte load brings a lane its part of 4 tiles.

In a log4 anchor of B = 4, code 2 r + h has its sign (1: negative) in bit 15 - 4 r + 16 h of the
word and its magnitude in the three bits from bit (4 - 4 r + 16 h) mod 32 on. Rotated left by 4 r
and masked, both halves of the word hold a sign and a magnitude where an fp16 number has its sign
and low bits; with one more bit set they are the denormals +-(16 m + 1) * 2^-24: the value but for
its scale. Elsewhere - uniform4's anchors, both codecs' corrections - the even codes 0, 2, 4, 6 are
in nibbles 0 to 3 and the odd ones in nibbles 4 to 7: one mask leaves the two halves of a register.
uniform4's anchor nibbles are unsigned, corrections two's complement.

With B = 2 a 4-bit code u, numbered in the order of values, is cut in two: u >> 2 in the anchor,
u & 3 in k_rest and v_rest. In log4 u is 8 + m of magnitude m, 7 - m if negative. Both halves lie,
in both codecs, in *pairs* of neighbouring tiles 2 j and 2 j + 1 of a row of tiles. A pair is 32
words of 8 nibbles, even ones first as above: the low two bits of a nibble are the code of tile 2 j
at its position, the high two bits that of tile 2 j + 1. Pairs are numbered and grouped like tiles.

Metadata lies in lane order too. Where a lane meets it by column (K per channel) it is stored as
[t][tile of the row][columns 2t, 2t+1, 2t+8, 2t+9]; where by row (V per channel in log4; V per token
in uniform4, which scales the rows of K times Q) as [g][tile of the column][rows g, g+8].

K's fields come before V's, and each part of an anchor starts at a multiple of 16 bytes, so that a
kernel can fetch them apart. Every record is padded with zero bytes to a multiple of 16.

log4 scales are 12-bit floats: the leading bits (8 exponent, 4 mantissa) of a positive fp32. A
record stores the smallest such 12-bit pattern it needs as its base, and each scale as an 8-bit
offset from it: scale = bitcast_fp32((base + offset) << 19).

`exact` keeps K's and V's raw bits rather than a correction: a correction would restore every bit
only where both sides evaluate the anchor with the same rounding, and devices differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

PAGE_STEP = 32
MAX_PAGE_SIZE = 256
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 16
RECORD_ALIGNMENT = 16
EXACT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# A 2-bit code c is worth (2 c - 3) TWO_BIT_STEP / top in log4, 4 c + TWO_BIT_MIDDLE in uniform4, in
# units of the scale: in or near the middle of the 4-bit values that it stands for.
TWO_BIT_STEP = 28
TWO_BIT_MIDDLE = 1.5

Target = Literal["exact", "int8"]
AnchorBits = Literal[4, 2]
Centre = Literal["midrange", "mean"]
Levels = Literal["linear", "interval", "corner"]


class FormatError(ValueError):
    """A page size, head size or dtype that no record layout exists for; names what is allowed."""


@dataclass(frozen=True, slots=True)
class Log4Settings:
    """Parameters of the log codec (Lynx, Algorithm 1); all but `centre` also shape the decoder.

    k_chunk, v_chunk: tokens that share one centre and scale per channel; must divide the page.
    alpha: curvature of the companding law; at 0, its limit, the law is linear.
    top: integer that the largest magnitude of a chunk maps to, 105..120.
    centre: what the encoder subtracts before it takes magnitudes.
    levels: what an anchor magnitude m decodes to: (16 m + 1) / top, which fits a `linear` law
        (small alpha) and costs a GPU one instruction for two codes; the `corner` value of 16 m, as
        in the paper; or the middle of its `interval`, where `last_level` places the last level
        instead, 0 at the lower edge and 1 at the upper edge of its interval.
    anchor_bits: bits of an anchor code; 2 take the law of alpha 0 and `linear` levels.
    """

    k_chunk: int = 32
    v_chunk: int = 64
    alpha: float = 0.0
    top: int = 118
    centre: Centre = "midrange"
    levels: Levels = "linear"
    last_level: float = 0.7
    anchor_bits: AnchorBits = 4

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise FormatError(f"alpha must be at least 0 and finite, got {self.alpha}")
        # 121 and more need a fourth magnitude bit, 104 and less leave the eighth level unused.
        if not 105 <= self.top <= 120:
            raise FormatError(f"top must be an integer from 105 to 120, got {self.top}")
        if self.centre not in ("midrange", "mean"):
            raise FormatError(f"centre must be midrange or mean, got {self.centre!r}")
        if self.levels not in get_args(Levels):
            allowed = ", ".join(get_args(Levels))
            raise FormatError(f"levels must be one of {allowed}, got {self.levels!r}")
        if not 0 <= self.last_level <= 1:
            raise FormatError(f"last_level must be from 0 to 1, got {self.last_level}")
        _check_anchor_bits(self.anchor_bits)
        if self.anchor_bits == 2 and (self.alpha != 0 or self.levels != "linear"):
            raise FormatError(
                "anchor_bits 2 needs alpha 0 and levels linear, "
                f"got alpha {self.alpha} and levels {self.levels}"
            )

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: AnchorBits = 4) -> Log4Settings:
        """The default settings, with V chunks that divide the page."""
        return cls(v_chunk=64 if page_size % 64 == 0 else 32, anchor_bits=anchor_bits)


@dataclass(frozen=True, slots=True)
class Uniform4Settings:
    """Parameters of the uniform codec (QuantSpec, section 4.2).

    k_group: tokens that share one scale and zero per channel of K; V's share them per token.
    anchor_bits: bits of an anchor code.
    """

    k_group: int = 64
    anchor_bits: AnchorBits = 4

    def __post_init__(self) -> None:
        _check_anchor_bits(self.anchor_bits)

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: AnchorBits = 4) -> Uniform4Settings:
        """The default settings, with K groups that divide the page."""
        return cls(k_group=64 if page_size % 64 == 0 else 32, anchor_bits=anchor_bits)


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
        """This field of uint8 records [..., nbytes] as [..., *shape] `dtype`, sharing memory.

        The records' last dimension must be contiguous and the other strides multiples of 16.
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
        """Records [*leading, nbytes] uint8 whose fields are to be written; padding is zero."""
        return torch.zeros((*leading, self.nbytes), dtype=torch.uint8, device=device)


def anchor_layout(
    settings: Log4Settings | Uniform4Settings, page_size: int, head_dim: int
) -> RecordLayout:
    """Layout of an anchor record. Raises FormatError for sizes that cannot be grouped or packed."""
    check_sizes(page_size, head_dim, settings.anchor_bits)
    codes = (page_size * head_dim * settings.anchor_bits // 8,)
    if isinstance(settings, Log4Settings):
        k_rows = _rows(page_size, settings.k_chunk, "k_chunk")
        v_rows = _rows(page_size, settings.v_chunk, "v_chunk")
        return _pack(
            ("scale_base", (2,), torch.int16),
            ("unused", (12,), torch.uint8),
            ("k_codes", codes, torch.uint8),
            ("k_centre", (k_rows, head_dim), torch.bfloat16),
            ("k_scale", (k_rows, head_dim), torch.uint8),
            ("v_codes", codes, torch.uint8),
            ("v_centre", (v_rows, head_dim), torch.bfloat16),
            ("v_scale", (v_rows, head_dim), torch.uint8),
        )
    groups = _rows(page_size, settings.k_group, "k_group")
    return _pack(
        ("k_codes", codes, torch.uint8),
        ("k_scale", (groups, head_dim), torch.bfloat16),
        ("k_zero", (groups, head_dim), torch.bfloat16),
        ("v_codes", codes, torch.uint8),
        ("v_scale", (page_size,), torch.bfloat16),
        ("v_zero", (page_size,), torch.bfloat16),
    )


def residual_layout(
    settings: Log4Settings | Uniform4Settings,
    target: Target,
    page_size: int,
    head_dim: int,
    kv_dtype: torch.dtype,
) -> RecordLayout:
    """Layout of a residual record, the same for both codecs. Raises FormatError like
    anchor_layout, and for a `kv_dtype` other than fp32, bf16 and fp16."""
    check_sizes(page_size, head_dim, settings.anchor_bits)
    if kv_dtype not in EXACT_DTYPES:
        raise FormatError(
            f"KV dtype must be one of {', '.join(map(str, EXACT_DTYPES))}, got {kv_dtype}"
        )
    if target == "int8":
        bits = {"codes": 4} if settings.anchor_bits == 4 else {"codes": 4, "rest": 2}
        return _pack(
            *(
                (f"{part}_{name}", (page_size * head_dim * width // 8,), torch.uint8)
                for part in ("k", "v")
                for name, width in bits.items()
            )
        )
    if target == "exact":
        values = (page_size, head_dim)
        return _pack(("k_bits", values, kv_dtype), ("v_bits", values, kv_dtype))
    raise FormatError(f"target must be exact or int8, got {target!r}")


def check_sizes(page_size: int, head_dim: int, anchor_bits: AnchorBits = 4) -> None:
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
    if anchor_bits == 2 and head_dim % 32:
        # Tiles of K lie in pairs along the head.
        raise FormatError(f"head size must be a multiple of 32 for anchor_bits 2, got {head_dim}")


def _check_anchor_bits(anchor_bits: AnchorBits) -> None:
    if anchor_bits not in get_args(AnchorBits):
        raise FormatError(f"anchor_bits must be 4 or 2, got {anchor_bits!r}")


def _rows(page_size: int, chunk: int, name: str) -> int:
    if chunk < 1 or page_size % chunk:
        allowed = [c for c in (16, 32, 64, 128, 256) if page_size % c == 0]
        raise FormatError(
            f"{name} must divide the page size {page_size} (for example {allowed}), got {chunk}"
        )
    return page_size // chunk


def _pack(*specs: tuple[str, tuple[int, ...], torch.dtype]) -> RecordLayout:
    fields: list[Field] = []
    offset = 0
    for name, shape, dtype in specs:
        assert offset % dtype.itemsize == 0, (name, offset)
        fields.append(Field(name, offset, shape, dtype))
        offset += fields[-1].nbytes
    padded = -(-offset // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    return RecordLayout(tuple(fields), padded)
