"""The log codec: Lynx's log-quantised anchors, the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvspec_kernels.formats import Log4Settings, RecordLayout
from kvspec_kernels.reference import log4
from sglang_kvspec.codecs.record_codec import KV, RecordCodec


@dataclass(frozen=True)
class Log4Codec(RecordCodec):
    """base.Codec over kvspec_kernels.reference.log4."""

    name: ClassVar[str] = "log4"

    settings: Log4Settings

    def _encode(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, corrections: RecordLayout | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return log4.encode(k_pages, v_pages, self.settings, self.anchor_layout, corrections)

    def _decode_anchor(self, anchor: torch.Tensor) -> KV:
        return log4.decode_anchor(anchor, self.settings, self.anchor_layout, self.dtype)

    def _decode_refined(self, anchor: torch.Tensor, residual: torch.Tensor) -> KV:
        layouts = (self.anchor_layout, self.residual_layout)
        return log4.decode_refined(anchor, residual, self.settings, *layouts, self.dtype)
