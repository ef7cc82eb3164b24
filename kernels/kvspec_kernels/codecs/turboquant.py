"""Declaration of TurboQuant's codec (arXiv 2504.19874)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from kvspec_kernels.codecs.fields import (
    TILE,
    FieldSpec,
    check_anchor_bits,
    code_rows,
    hadamard_block,
)
from kvspec_kernels.codecs.kernels import TritonDecode, TritonEncode
from kvspec_kernels.codecs.spec import CodecSpec

# Values of a page for each thread. A thread holds fewer at once, as the kernel takes 16 tokens at a
# time: a quarter of these for pages of 64.
THREAD_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class TurboQuantSettings(CodecSpec):
    """Parameters of TurboQuant's codec. The paper mixes widths over channels to 2.5 and 3.5 bits;
    here all codes have one width, by default 3.

    seed: of the random rotation, which all records share.
    anchor_bits: bits of an anchor code.
    """

    name: ClassVar[str] = "turboquant"
    reference: ClassVar[str] = "kvspec_kernels.reference.turboquant"
    bit_choices: ClassVar[tuple[int, ...]] = (3, 2, 4)
    has_kernels: ClassVar[bool] = True

    seed: int = 0
    anchor_bits: int = 3

    def __post_init__(self) -> None:
        check_anchor_bits(self.anchor_bits, self.bit_choices)

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: int = 3) -> Self:
        """Return the default settings, which suit all page sizes."""
        return cls(anchor_bits=anchor_bits)

    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        codes = code_rows(page_size, head_dim, self.anchor_bits)
        norms = (page_size, head_dim // hadamard_block(head_dim))
        return tuple(
            field
            for part in "kv"
            for field in (
                FieldSpec(f"{part}_codes", codes, "uint8"),
                FieldSpec(f"{part}_norm", norms, "bfloat16"),
            )
        )

    def triton_encode(self) -> TritonEncode:
        # Metadata belongs to tokens.
        part = "kvspec_kernels.jit.encode_turboquant:turboquant_part"
        chunks = (TILE, TILE)
        return TritonEncode(part, part, ("norm",), chunks, law=(), thread_elements=THREAD_ELEMENTS)

    def triton_decode(self, page_size: int) -> TritonDecode:
        return TritonDecode(
            "kvspec_kernels.jit.turboquant:decode_turboquant",
            "norm",
            (page_size, page_size),
            scale="norm",
            rotates=True,
        )
