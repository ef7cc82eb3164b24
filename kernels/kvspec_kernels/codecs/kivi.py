"""Declaration of KIVI's codec (arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar, Self

from kvspec_kernels.codecs.fields import FieldSpec, check_anchor_bits, code_rows, num_chunks
from kvspec_kernels.codecs.spec import CodecSpec


@dataclass(frozen=True, slots=True)
class KiviSettings(CodecSpec):
    """Parameters of KIVI's codec.

    group: tokens that share one scale and zero per channel of K, and channels that share them per
    token of V. A head that is no multiple of the group has V groups of the largest common divisor.
    anchor_bits: bits of an anchor code.
    """

    name: ClassVar[str] = "kivi"
    reference: ClassVar[str] = "kvspec_kernels.reference.kivi"
    bit_choices: ClassVar[tuple[int, ...]] = (2, 3, 4)

    group: int = 32
    anchor_bits: int = 2

    def __post_init__(self) -> None:
        check_anchor_bits(self.anchor_bits, self.bit_choices)

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: int = 2) -> Self:
        """Return the default settings, which suit all page sizes."""
        return cls(anchor_bits=anchor_bits)

    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        codes = code_rows(page_size, head_dim, self.anchor_bits)
        k_metadata = (num_chunks(page_size, self.group, "group"), head_dim)
        v_metadata = (page_size, head_dim // gcd(head_dim, self.group))
        return (
            FieldSpec("k_codes", codes, "uint8"),
            FieldSpec("k_scale", k_metadata, "bfloat16"),
            FieldSpec("k_zero", k_metadata, "bfloat16"),
            FieldSpec("v_codes", codes, "uint8"),
            FieldSpec("v_scale", v_metadata, "bfloat16"),
            FieldSpec("v_zero", v_metadata, "bfloat16"),
        )
