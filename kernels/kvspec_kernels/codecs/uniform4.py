"""Declaration of the uniform codec (QuantSpec, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from kvspec_kernels.codecs.fields import (
    TILE,
    FieldSpec,
    check_anchor_bits,
    code_bytes,
    eight_bit_corrections,
    num_chunks,
)
from kvspec_kernels.codecs.kernels import CudaAttention, CudaEncode, TritonDecode, TritonEncode
from kvspec_kernels.codecs.spec import CodecSpec

# 128 are no faster (H200, page 64, head 128).
THREAD_ELEMENTS = 64
# Bytes of shared memory: 16 of prepared values, 2 unused, 4 of metadata, 4 for corrections.
ENTRY_BYTES = 26
# Tokens of two tiles.
PAIR_STEP = 32


@dataclass(frozen=True, slots=True)
class Uniform4Settings(CodecSpec):
    """Parameters of the uniform codec.

    k_group: tokens that share one scale and zero per channel of K. V has one pair per token.
    anchor_bits: bits of an anchor code.
    """

    name: ClassVar[str] = "uniform4"
    reference: ClassVar[str] = "kvspec_kernels.reference.uniform4"
    bit_choices: ClassVar[tuple[int, ...]] = (4, 2)
    has_kernels: ClassVar[bool] = True

    k_group: int = 64
    anchor_bits: int = 4

    def __post_init__(self) -> None:
        check_anchor_bits(self.anchor_bits, self.bit_choices)

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: int = 4) -> Self:
        """Return the default settings, with K groups that divide the page."""
        return cls(k_group=64 if page_size % 64 == 0 else 32, anchor_bits=anchor_bits)

    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        codes = code_bytes(page_size, head_dim, self.anchor_bits)
        k_metadata = (num_chunks(page_size, self.k_group, "k_group"), head_dim)
        return (
            FieldSpec("k_codes", codes, "uint8"),
            FieldSpec("k_scale", k_metadata, "bfloat16"),
            FieldSpec("k_zero", k_metadata, "bfloat16"),
            FieldSpec("v_codes", codes, "uint8"),
            FieldSpec("v_scale", (page_size,), "bfloat16"),
            FieldSpec("v_zero", (page_size,), "bfloat16"),
        )

    def correction_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        return eight_bit_corrections(page_size, head_dim, self.anchor_bits)

    def triton_encode(self) -> TritonEncode:
        # V has no chunks: the kernel takes the tokens of one tile at a time.
        chunks = (self.k_group, TILE)
        return TritonEncode(
            "kvspec_kernels.jit.records:uniform4_k",
            "kvspec_kernels.jit.records:uniform4_v",
            ("scale", "zero"),
            chunks,
            law=(),
            thread_elements=THREAD_ELEMENTS,
        )

    def triton_decode(self, page_size: int) -> TritonDecode:
        return TritonDecode(
            "kvspec_kernels.jit.uniform4:decode_uniform4",
            "zero",
            (self.k_group, page_size),
            is_affine=True,
        )

    def cuda_encode(self, page_size: int) -> CudaEncode | None:
        if self != self.for_page(page_size):
            return None
        # V has no chunks: the kernel loads as many tokens at a time as for K.
        chunks = (self.k_group, self.k_group)
        return CudaEncode({"LOG4": 0, "TOP": 0}, "scale", chunks, ENTRY_BYTES, per_token=True)

    def cuda_attention(self) -> CudaAttention | None:
        # Metadata may change between pairs of 16 tokens only.
        if self.k_group % PAIR_STEP:
            return None
        return CudaAttention(
            defines={"LOG4": 0, "TOP": 1},
            arithmetics=("int8",) if self.anchor_bits == 2 else ("fp16", "int8"),
            verifies=True,
        )
