"""Declaration of RotateKV's codec (arXiv 2501.16383)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from kvspec_kernels.codecs.fields import FieldSpec, check_anchor_bits, code_rows
from kvspec_kernels.codecs.spec import CodecSpec

# Channels of a head that share scale and zero, at most.
MAX_GROUP = 128


@dataclass(frozen=True, slots=True)
class RotateKVSettings(CodecSpec):
    """Parameters of RotateKV's codec. A token's head has one scale and zero, or two of half a head
    each above 128 channels.

    anchor_bits: bits of an anchor code.
    """

    name: ClassVar[str] = "rotatekv"
    reference: ClassVar[str] = "kvspec_kernels.reference.rotatekv"
    bit_choices: ClassVar[tuple[int, ...]] = (2, 3, 4)

    anchor_bits: int = 2

    def __post_init__(self) -> None:
        check_anchor_bits(self.anchor_bits, self.bit_choices)

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: int = 2) -> Self:
        """Return the default settings, which suit all page sizes."""
        return cls(anchor_bits=anchor_bits)

    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        codes = code_rows(page_size, head_dim, self.anchor_bits)
        metadata = (page_size, 2 if head_dim > MAX_GROUP else 1)
        return tuple(
            field
            for part in "kv"
            for field in (
                FieldSpec(f"{part}_codes", codes, "uint8"),
                FieldSpec(f"{part}_scale", metadata, "bfloat16"),
                FieldSpec(f"{part}_zero", metadata, "bfloat16"),
            )
        )
