"""The packed form of residuals of the target exact, for pages outside of a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
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
# Values that plain torch packs or unpacks at once, with up to 180 bytes of temporaries each.
VALUES_AT_ONCE = 1 << 18


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
        """Return the packed form of these anchors and residuals. Raises FormatError where it is not
        defined."""
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
        if residual.is_cuda:
            return self._pack_by_kernel(anchor, residual)
        parts = []
        for some in self._at_once(residual):
            k, v = exact.decode(residual[some], self.raw_layout)
            parts.append(packed_exact.encode(k, v, *self._known(anchor[some])))
        heads = residual.shape[1]
        none = PackedRecords(
            residual.new_empty(0, heads, self.record_bytes),
            torch.empty((0, heads), dtype=torch.bool, device=residual.device),
            residual.new_empty(0, self.raw_v_bytes),
        )
        done = [none, *(PackedRecords(part.records, part.fits, part.raw_v) for part in parts)]
        return PackedRecords(*(torch.cat(each) for each in zip(*done, strict=True)))

    def unpack(
        self, anchor: torch.Tensor, records: torch.Tensor, raw_v: torch.Tensor
    ) -> torch.Tensor:
        """Return the raw residuals that pack() was given, on their device. Records that no pack()
        made give garbage, and raise nothing."""
        if records.is_cuda:
            return self._unpack_by_kernel(anchor, records, raw_v)
        num_pages, heads = records.shape[:2]
        residual = self.raw_layout.empty_records((num_pages, heads), records.device)
        first = 0
        for some in self._at_once(records):
            count = int((~self.fits(records[some])).sum())
            rows = raw_v[first : first + count]
            pages = packed_exact.decode(records[some], rows, *self._known(anchor[some]))
            residual[some] = exact.encode(*pages, self.raw_layout)
            first += count
        return residual

    def _pack_by_kernel(self, anchor: torch.Tensor, residual: torch.Tensor) -> PackedRecords:
        # Late import: servers on a CPU have no Triton.
        from kvspec_kernels.ops.packed_exact import pack

        raw, shape = residual.flatten(0, 1), residual.shape[:2]
        records, fits = pack(anchor.flatten(0, 1), raw, self.anchor_layout, self.layout)
        raw_v = raw[~fits][:, self.raw_v_bytes :]
        return PackedRecords(torch.unflatten(records, 0, shape), fits.view(shape), raw_v)

    def _unpack_by_kernel(
        self, anchor: torch.Tensor, records: torch.Tensor, raw_v: torch.Tensor
    ) -> torch.Tensor:
        from kvspec_kernels.ops.packed_exact import unpack

        layouts = (self.anchor_layout, self.layout)
        raw = unpack(anchor.flatten(0, 1), records.flatten(0, 1), raw_v, *layouts)
        return torch.unflatten(raw, 0, records.shape[:2])

    def _at_once(self, records: torch.Tensor) -> Iterator[slice]:
        """Yield slices of pages whose values are few enough."""
        num_pages, heads = records.shape[:2]
        step = max(1, VALUES_AT_ONCE // (heads * 2 * self.layout.num_values))
        for first in range(0, num_pages, step):
            yield slice(first, min(first + step, num_pages))

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
