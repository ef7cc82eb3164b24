"""The uniform codec: QuantSpec's hierarchical INT4 cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvspec_kernels.formats import RecordLayout, Uniform4Settings
from kvspec_kernels.reference import uniform4
from sglang_kvspec.codecs.record_codec import KV, RecordCodec


@dataclass(frozen=True)
class Uniform4Codec(RecordCodec):
    """base.Codec over kvspec_kernels.reference.uniform4."""

    name: ClassVar[str] = "uniform4"

    settings: Uniform4Settings

    def _encode(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, corrections: RecordLayout | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return uniform4.encode(k_pages, v_pages, self.settings, self.anchor_layout, corrections)

    def _decode_anchor(self, anchor: torch.Tensor) -> KV:
        return uniform4.decode_anchor(anchor, self.settings, self.anchor_layout, self.dtype)

    def _decode_refined(self, anchor: torch.Tensor, residual: torch.Tensor) -> KV:
        layouts = (self.anchor_layout, self.residual_layout)
        return uniform4.decode_refined(anchor, residual, self.settings, *layouts, self.dtype)
