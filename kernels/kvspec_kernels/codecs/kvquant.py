"""Declaration of KVQuant's codec (arXiv 2401.18079)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from kvspec_kernels.codecs.fields import FieldSpec, FormatError, check_anchor_bits, code_rows
from kvspec_kernels.codecs.spec import CodecSpec

# Outliers are counted in steps of this, so that each of their fields fills 16 bytes.
OUTLIER_STEP = 8


@dataclass(frozen=True, slots=True)
class KVQuantSettings(CodecSpec):
    """Parameters of KVQuant's codec.

    outlier_percent: share of the values of K, and of V, that a record keeps apart.
    anchor_bits: bits of an anchor code.
    """

    name: ClassVar[str] = "kvquant"
    reference: ClassVar[str] = "kvspec_kernels.reference.kvquant"
    bit_choices: ClassVar[tuple[int, ...]] = (3, 2, 4)

    outlier_percent: int = 1
    anchor_bits: int = 3

    def __post_init__(self) -> None:
        check_anchor_bits(self.anchor_bits, self.bit_choices)
        if not 1 <= self.outlier_percent <= 50:
            raise FormatError(f"outlier_percent must be 1 to 50, got {self.outlier_percent!r}")

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: int = 3) -> Self:
        """Return the default settings, which suit all page sizes."""
        return cls(anchor_bits=anchor_bits)

    def num_outliers(self, page_size: int, head_dim: int) -> int:
        """Return the number of outliers of K, and of V: at least outlier_percent, in steps of
        OUTLIER_STEP."""
        wanted = page_size * head_dim * self.outlier_percent
        return -(-wanted // (100 * OUTLIER_STEP)) * OUTLIER_STEP

    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        codes = code_rows(page_size, head_dim, self.anchor_bits)
        outliers = (self.num_outliers(page_size, head_dim),)
        vectors = {"k": (head_dim,), "v": (page_size,)}
        return (
            FieldSpec("levels", (2, 1 << self.anchor_bits), "float16"),
            *(
                field
                for part in "kv"
                for field in (
                    FieldSpec(f"{part}_codes", codes, "uint8"),
                    FieldSpec(f"{part}_centre", vectors[part], "bfloat16"),
                    FieldSpec(f"{part}_reach", vectors[part], "bfloat16"),
                    FieldSpec(f"{part}_outliers", outliers, "bfloat16"),
                    FieldSpec(f"{part}_places", outliers, "int16"),
                )
            ),
        )
