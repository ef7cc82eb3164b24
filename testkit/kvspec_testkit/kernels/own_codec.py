"""A codec with Triton functions of its own, as another package could have.

Its records have the fields of uniform4. Values decode to their negatives. The Triton encoder writes
only a mark into each part's codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import triton
import triton.language as tl

from kvspec_kernels.codecs import CodecSpec, FieldSpec
from kvspec_kernels.codecs.kernels import TritonDecode, TritonEncode
from kvspec_kernels.codecs.uniform4 import Uniform4Settings
from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.jit.uniform4 import decode_uniform4
from kvspec_kernels.reference import uniform4

KV = tuple[torch.Tensor, torch.Tensor]

K_MARK, V_MARK = 7, 9
_K_MARK, _V_MARK = tl.constexpr(K_MARK), tl.constexpr(V_MARK)


@dataclass(frozen=True, slots=True)
class NegatedSettings(CodecSpec):
    """Declaration of the codec, with the parameters of uniform4 for pages of 64 tokens."""

    name: ClassVar[str] = "negated"
    reference: ClassVar[str] = __name__
    bit_choices: ClassVar[tuple[int, ...]] = (4,)
    has_kernels: ClassVar[bool] = True

    @property
    def anchor_bits(self) -> int:
        return 4

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: int) -> Self:
        return cls()

    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        return Uniform4Settings().anchor_fields(page_size, head_dim)

    def correction_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        return Uniform4Settings().correction_fields(page_size, head_dim)

    def triton_encode(self) -> TritonEncode:
        return TritonEncode(
            f"{__name__}:mark_k",
            f"{__name__}:mark_v",
            ("scale", "zero"),
            (64, 64),
            law=(),
            thread_elements=64,
        )

    def triton_decode(self, page_size: int) -> TritonDecode:
        return TritonDecode(f"{__name__}:decode_negated", "zero", (64, page_size))


@triton.jit
def decode_negated(
    anchor_ptr,
    residual_ptr,
    table_ptr,
    tokens,
    channels,
    chunk,
    mask_channels,
    PART: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    REFINED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    CORRECTIONS: tl.constexpr,
):
    """Return the negated values of decode_uniform4. Arguments are those of decode_log4."""
    values = decode_uniform4(
        anchor_ptr,
        residual_ptr,
        table_ptr,
        tokens,
        channels,
        chunk,
        mask_channels,
        PART=PART,
        ANCHOR_BITS=ANCHOR_BITS,
        REFINED=REFINED,
        PAGE_SIZE=PAGE_SIZE,
        HEAD_DIM=HEAD_DIM,
        CODES=CODES,
        OFFSET=OFFSET,
        SCALE=SCALE,
        CORRECTIONS=CORRECTIONS,
    )
    return -values


@triton.jit
def mark_k(
    page_ptr,
    anchor_ptr,
    corrections_ptr,
    edges_ptr,
    one,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
    LAW: tl.constexpr,
):
    """Write a mark into K's codes. Arguments are those of jit/records.py."""
    tl.store(anchor_ptr + FIELDS[0], _K_MARK)


@triton.jit
def mark_v(
    page_ptr,
    anchor_ptr,
    corrections_ptr,
    edges_ptr,
    one,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
    LAW: tl.constexpr,
):
    """Write a mark into V's codes. Arguments are those of jit/records.py."""
    tl.store(anchor_ptr + FIELDS[0], _V_MARK)


# Reference functions; see kvspec_kernels.reference.codec.KernelReference.


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: NegatedSettings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return uniform4.encode(-k, -v, Uniform4Settings(), anchor_layout, residual_layout)


def decode_anchor(
    anchors: torch.Tensor, settings: NegatedSettings, layout: RecordLayout, dtype: torch.dtype
) -> KV:
    k, v = uniform4.decode_anchor(anchors, Uniform4Settings(), layout, dtype)
    return -k, -v


def decode_refined(
    anchors: torch.Tensor,
    residuals: torch.Tensor,
    settings: NegatedSettings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout,
    dtype: torch.dtype,
) -> KV:
    layouts = (anchor_layout, residual_layout)
    k, v = uniform4.decode_refined(anchors, residuals, Uniform4Settings(), *layouts, dtype)
    return -k, -v


def encode_table(settings: Any, head_dim: int) -> list[float]:
    return []


def code_values(settings: Any, head_dim: int, device: torch.device, *, refined: bool) -> None:
    """Return no table: the kernel computes values."""
