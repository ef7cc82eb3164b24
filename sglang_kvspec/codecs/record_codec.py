"""The codec that a specification declares, bound to a model's sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.formats import RecordLayout, Target, anchor_layout, residual_layout
from kvspec_kernels.reference import exact
from kvspec_kernels.reference.codec import ReferenceCodec, reference_of
from sglang_kvspec.codecs.accounting import bits_per_element
from sglang_kvspec.codecs.base import EncodedPages
from sglang_kvspec.codecs.checks import check_pages, check_records
from sglang_kvspec.codecs.packed_residual import PackedResidual

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RecordCodec:
    """base.Codec of any CodecSpec, by its reference functions. Raises FormatError for unsupported
    sizes.

    packs: residuals outside of the KV cache are packed.
    """

    settings: CodecSpec
    target: Target
    page_size: int
    head_dim: int
    dtype: torch.dtype
    debug: bool = False
    packs: bool = False
    anchor_layout: RecordLayout = field(init=False, repr=False)
    residual_layout: RecordLayout = field(init=False, repr=False)
    packed: PackedResidual | None = field(init=False, repr=False)
    _reference: ReferenceCodec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = (self.page_size, self.head_dim)
        # Derived once; a frozen dataclass sets its own fields this way.
        object.__setattr__(self, "anchor_layout", anchor_layout(self.settings, *size))
        layout = residual_layout(self.settings, self.target, *size, self.dtype)
        object.__setattr__(self, "residual_layout", layout)
        object.__setattr__(self, "_reference", reference_of(self.settings))
        packed = None
        if self.packs:
            layouts = (self.anchor_layout, self.residual_layout)
            packed = PackedResidual.of(self.settings, *layouts, *size, self.dtype)
        object.__setattr__(self, "packed", packed)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def anchor_bytes(self) -> int:
        return self.anchor_layout.nbytes

    @property
    def residual_bytes(self) -> int:
        return self.residual_layout.nbytes

    @property
    def anchor_bits_per_element(self) -> float:
        return bits_per_element(self.anchor_layout, self.page_size, self.head_dim)

    def encode(self, k_pages: torch.Tensor, v_pages: torch.Tensor) -> EncodedPages:
        check_pages(self, k_pages, v_pages, self.debug)
        corrections = self.residual_layout if self.target == "int8" else None
        anchor, residual = self._reference.encode(
            k_pages, v_pages, self.settings, self.anchor_layout, corrections
        )
        if residual is None:
            residual = exact.encode(k_pages, v_pages, self.residual_layout)
        return EncodedPages(anchor, residual)

    def encode_exact(self, k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
        """Return residual records of the target `exact` alone, for pages that no draft reads.
        Arguments as encode()."""
        assert self.target == "exact", "int8 residuals are corrections to anchors"
        check_pages(self, k_pages, v_pages, self.debug)
        return exact.encode(k_pages, v_pages, self.residual_layout)

    def decode_exact(self, residual: torch.Tensor) -> KV:
        assert self.target == "exact", "int8 residuals are corrections to anchors"
        check_records("residual", residual, self.residual_bytes)
        return exact.decode(residual, self.residual_layout)

    def decode_anchor(self, anchor: torch.Tensor) -> KV:
        check_records("anchor", anchor, self.anchor_bytes)
        return self._reference.decode_anchor(anchor, self.settings, self.anchor_layout, self.dtype)

    def decode_target(self, anchor: torch.Tensor, residual: torch.Tensor) -> KV:
        check_records("anchor", anchor, self.anchor_bytes)
        if self.target == "exact":
            return self.decode_exact(residual)
        check_records("residual", residual, self.residual_bytes)
        layouts = (self.anchor_layout, self.residual_layout)
        return self._reference.decode_refined(anchor, residual, self.settings, *layouts, self.dtype)
