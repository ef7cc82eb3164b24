"""The packed form of residuals of the target exact, for pages outside of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.codecs.uniform4 import Uniform4Settings
from kvspec_kernels.formats import FormatError, RecordLayout
from kvspec_kernels.packed_format import PackedLayout
from kvspec_kernels.reference import exact, packed_exact
from kvspec_kernels.reference.codec import reference_of

ANCHOR_BITS = 4


class PackedRecords(NamedTuple):
    """Packed residuals of pages. records: [N, num_kv_heads, record_bytes] uint8. fits: which of
    them fit, [N, num_kv_heads] bool. raw_v: V of the others, in order of pages and heads, [number
    of them, raw_v_bytes] uint8."""

    records: torch.Tensor
    fits: torch.Tensor
    raw_v: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedResidual:
    """Packs raw residual records beside their anchors, and unpacks them with the same anchors. With
    other anchors, unpacked pages are garbage. Format: kvspec_kernels.packed_format."""

    settings: CodecSpec
    anchor_layout: RecordLayout
    raw_layout: RecordLayout
    layout: PackedLayout

    @classmethod
    def of(
        cls,
        settings: CodecSpec,
        anchor_layout: RecordLayout,
        raw_layout: RecordLayout,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> PackedResidual:
        """Raises FormatError where the packed form is not defined."""
        if not isinstance(settings, Uniform4Settings) or settings.anchor_bits != ANCHOR_BITS:
            raise FormatError(
                f"packed residuals need uniform4 anchors of {ANCHOR_BITS} bits, got "
                f"{settings.name} anchors of {settings.anchor_bits} bits"
            )
        layout = PackedLayout(page_size, head_dim, dtype)
        return cls(settings, anchor_layout, raw_layout, layout)

    @property
    def record_bytes(self) -> int:
        return self.layout.nbytes

    @property
    def raw_v_bytes(self) -> int:
        """Bytes of V of a record that does not fit."""
        return self.layout.raw_nbytes

    def pack(self, anchor: torch.Tensor, residual: torch.Tensor) -> PackedRecords:
        """Pack raw residuals [N, num_kv_heads, residual_bytes] of pages whose anchors are `anchor`
        [N, num_kv_heads, anchor_bytes], on their device."""
        k, v = exact.decode(residual, self.raw_layout)
        packed = packed_exact.encode(k, v, *self._known(anchor))
        return PackedRecords(packed.records, packed.fits, packed.raw_v)

    def unpack(
        self, anchor: torch.Tensor, records: torch.Tensor, raw_v: torch.Tensor
    ) -> torch.Tensor:
        """Return the raw residuals that pack() was given, on their device. Records that no pack()
        made give garbage, and raise nothing."""
        pages = packed_exact.decode(records, raw_v, *self._known(anchor))
        return exact.encode(*pages, self.raw_layout)

    def fits(self, records: torch.Tensor) -> torch.Tensor:
        """Return which records [..., record_bytes] say that they fit: [...] bool."""
        return records[..., :2].contiguous().view(torch.int16).squeeze(-1) == 1

    def _known(
        self, anchor: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, RecordLayout, PackedLayout]:
        values = reference_of(self.settings).decode_anchor(
            anchor, self.settings, self.anchor_layout, self.layout.dtype
        )
        return values, anchor, self.anchor_layout, self.layout
