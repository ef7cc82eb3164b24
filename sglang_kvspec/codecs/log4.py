"""The log codec: Lynx's log-quantised anchors, the default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvspec_kernels.formats import (
    Log4Settings,
    RecordLayout,
    Target,
    anchor_layout,
    residual_layout,
)
from kvspec_kernels.reference import exact, log4
from sglang_kvspec.codecs.accounting import bits_per_element
from sglang_kvspec.codecs.base import EncodedPages
from sglang_kvspec.codecs.checks import check_pages, check_records


@dataclass(frozen=True)
class Log4Codec:
    """base.Codec over kvspec_kernels.reference.log4. Raises FormatError for unsupported sizes."""

    name: ClassVar[str] = "log4"

    target: Target
    page_size: int
    head_dim: int
    dtype: torch.dtype
    settings: Log4Settings
    debug: bool = False
    anchor_layout: RecordLayout = field(init=False, repr=False)
    residual_layout: RecordLayout = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = (self.page_size, self.head_dim)
        # Derived once; a frozen dataclass sets its own fields this way.
        object.__setattr__(self, "anchor_layout", anchor_layout(self.settings, *size))
        layout = residual_layout(self.target, *size, self.dtype)
        object.__setattr__(self, "residual_layout", layout)

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
        anchor, residual = log4.encode(
            k_pages, v_pages, self.settings, self.anchor_layout, corrections
        )
        if residual is None:
            residual = exact.encode(k_pages, v_pages, self.residual_layout)
        return EncodedPages(anchor, residual)

    def decode_anchor(self, anchor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check_records("anchor", anchor, self.anchor_bytes)
        return log4.decode_anchor(anchor, self.settings, self.anchor_layout, self.dtype)

    def decode_target(
        self, anchor: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_records("anchor", anchor, self.anchor_bytes)
        check_records("residual", residual, self.residual_bytes)
        if self.target == "exact":
            return exact.decode(residual, self.residual_layout)
        return log4.decode_refined(
            anchor,
            residual,
            self.settings,
            self.anchor_layout,
            self.residual_layout,
            self.dtype,
        )
