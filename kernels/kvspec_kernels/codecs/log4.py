"""Declaration of the log codec (Lynx, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, get_args

from kvspec_kernels.codecs.fields import (
    FieldSpec,
    FormatError,
    check_anchor_bits,
    code_bytes,
    eight_bit_corrections,
    num_chunks,
)
from kvspec_kernels.codecs.kernels import CudaAttention, CudaEncode, TritonDecode, TritonEncode
from kvspec_kernels.codecs.spec import CodecSpec

Centre = Literal["midrange", "mean"]
Levels = Literal["linear", "interval", "corner"]

# Tokens that a pair of V's tiles spans.
PAIR_STEP = 32
# Beyond these bounds, fp32 arithmetic cannot evaluate the steep or flat end of the law.
MAX_ALPHA = 64.0
MIN_ALPHA_OF_LOGARITHM = 0.05
# The kernel adds this to the law before rounding. It exceeds the law's error in fp32 (6e-4) and is
# far less than one step.
PUSH = 2e-3
# Twice the elements of uniform4: 1.3 times as fast as 64 (H200, page 64, head 128).
THREAD_ELEMENTS = 128
# Bytes of shared memory: 16 of prepared values, 2 unused, 3 of metadata.
ENTRY_BYTES = 21


@dataclass(frozen=True, slots=True)
class Log4Settings(CodecSpec):
    """Parameters of the log codec.

    k_chunk, v_chunk: tokens that share one centre and scale per channel; must divide the page.
    alpha: curvature of the companding law; at 0, its limit, the law is linear.
    top: integer that the largest magnitude of a chunk maps to, 105..120.
    centre: what the encoder subtracts before it takes magnitudes.
    levels: value that an anchor magnitude m decodes to. `linear`: (16 m + 1) / top, which fits a
        small alpha and costs a GPU one instruction for two codes. `corner`: the value of 16 m, as
        in the paper. `interval`: the middle of m's interval, except for the last magnitude.
    last_level: place of the last `interval` level, from 0 at the lower edge of its interval to 1 at
        the upper edge.
    anchor_bits: bits of an anchor code. 2 needs alpha 0 and `linear` levels.
    """

    name: ClassVar[str] = "log4"
    reference: ClassVar[str] = "kvspec_kernels.reference.log4"
    bit_choices: ClassVar[tuple[int, ...]] = (4, 2)
    has_kernels: ClassVar[bool] = True

    k_chunk: int = 32
    v_chunk: int = 64
    alpha: float = 0.0
    top: int = 118
    centre: Centre = "midrange"
    levels: Levels = "linear"
    last_level: float = 0.7
    anchor_bits: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise FormatError(f"alpha must be at least 0 and finite, got {self.alpha}")
        # 121 and more need a fourth magnitude bit; 104 and less leave the eighth level unused.
        if not 105 <= self.top <= 120:
            raise FormatError(f"top must be an integer from 105 to 120, got {self.top}")
        if self.centre not in ("midrange", "mean"):
            raise FormatError(f"centre must be midrange or mean, got {self.centre!r}")
        if self.levels not in get_args(Levels):
            allowed = ", ".join(get_args(Levels))
            raise FormatError(f"levels must be one of {allowed}, got {self.levels!r}")
        if not 0 <= self.last_level <= 1:
            raise FormatError(f"last_level must be from 0 to 1, got {self.last_level}")
        check_anchor_bits(self.anchor_bits, self.bit_choices)
        if self.anchor_bits == 2 and (self.alpha != 0 or self.levels != "linear"):
            raise FormatError(
                "anchor_bits 2 needs alpha 0 and levels linear, "
                f"got alpha {self.alpha} and levels {self.levels}"
            )

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: int = 4) -> Self:
        """Return the default settings, with V chunks that divide the page."""
        return cls(v_chunk=64 if page_size % 64 == 0 else 32, anchor_bits=anchor_bits)

    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        codes = code_bytes(page_size, head_dim, self.anchor_bits)
        k_metadata = (num_chunks(page_size, self.k_chunk, "k_chunk"), head_dim)
        v_metadata = (num_chunks(page_size, self.v_chunk, "v_chunk"), head_dim)
        return (
            FieldSpec("scale_base", (2,), "int16"),
            FieldSpec("unused", (12,), "uint8"),
            FieldSpec("k_codes", codes, "uint8"),
            FieldSpec("k_centre", k_metadata, "bfloat16"),
            FieldSpec("k_scale", k_metadata, "uint8"),
            FieldSpec("v_codes", codes, "uint8"),
            FieldSpec("v_centre", v_metadata, "bfloat16"),
            FieldSpec("v_scale", v_metadata, "uint8"),
        )

    def correction_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        return eight_bit_corrections(page_size, head_dim, self.anchor_bits)

    def triton_encode(self) -> TritonEncode:
        if self.centre != "midrange":
            raise FormatError(
                "kernels need centre midrange, got "
                f"{self.centre}: a mean depends on the order of summation"
            )
        if self.alpha > MAX_ALPHA:
            raise FormatError(f"kernels need alpha up to {MAX_ALPHA}, got {self.alpha}")
        if self.anchor_bits == 2 and self.v_chunk % PAIR_STEP:
            raise FormatError(
                f"kernels need v_chunk in multiples of {PAIR_STEP} for anchor_bits 2, "
                f"got {self.v_chunk}"
            )
        chunks = (self.k_chunk, self.v_chunk)
        return TritonEncode(
            "kvspec_kernels.jit.records:log4_k",
            "kvspec_kernels.jit.records:log4_v",
            ("centre", "scale"),
            chunks,
            law=self._law(),
            thread_elements=THREAD_ELEMENTS,
        )

    def _law(self) -> tuple[float, ...]:
        if self.alpha == 0:
            return (float(self.top),)
        if self.alpha < MIN_ALPHA_OF_LOGARITHM:
            return ()
        slope = self.top / math.log2(1 + self.alpha)
        # This lifts the law by PUSH at the far end, where the lift is smallest.
        return (self.alpha, 1 + PUSH * (1 + self.alpha) * math.log(2) / slope, slope)

    def triton_decode(self, page_size: int) -> TritonDecode:
        return TritonDecode(
            "kvspec_kernels.jit.log4:decode_log4", "centre", (self.k_chunk, self.v_chunk)
        )

    def cuda_encode(self, page_size: int) -> CudaEncode | None:
        """Return constants for the default settings, with any `top` and any settings that only
        decoders use. Return None for other settings."""
        usual = self.for_page(page_size)
        same = replace(self, top=usual.top, levels=usual.levels, last_level=usual.last_level)
        if same != usual:
            return None
        chunks = (self.k_chunk, self.v_chunk)
        defines = {"LOG4": 1, "TOP": self.top}
        return CudaEncode(defines, "centre", chunks, ENTRY_BYTES, per_token=False)

    def cuda_attention(self) -> CudaAttention | None:
        # Metadata may change between pairs of 16 tokens only, and values need no table.
        if self.levels != "linear" or any(c % PAIR_STEP for c in (self.k_chunk, self.v_chunk)):
            return None
        return CudaAttention(
            defines={"LOG4": 1, "TOP": self.top},
            # 4-bit codes become int8 through a table of 8 magnitudes and a sign, which takes 1.2 to
            # 1.4 times as long as fp16.
            arithmetics=("int8",) if self.anchor_bits == 2 else ("fp16",),
            # Only the linear law has 8-bit codes proportional to values, as the kernel needs.
            verifies=self.alpha == 0 and self.v_chunk % 64 == 0,
        )
