"""The packed form of residuals of the target exact, for pages outside of a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.codecs.uniform4 import Uniform4Settings
from kvspec_kernels.formats import FormatError, RecordLayout
from kvspec_kernels.ops.attention_plan import Backend
from kvspec_kernels.packed_format import VERSION, PackedLayout
from kvspec_kernels.reference import exact, packed_exact
from kvspec_kernels.reference.codec import reference_of

ANCHOR_BITS = 4
# Values that plain torch packs or unpacks at once, with up to 180 bytes of temporaries each.
VALUES_AT_ONCE = 1 << 18

# (raw_rows, anchor_rows, records, raw_v, ranks, first_layer): see PackedResidual.unpacker().
Unpack = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]


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
    def form(self) -> str:
        """Name with the format's version."""
        return f"packed_{VERSION}"

    @property
    def record_bytes(self) -> int:
        return self.layout.nbytes

    @property
    def raw_v_bytes(self) -> int:
        """Bytes of V of a record that does not fit."""
        return self.layout.raw_nbytes

    def anchors_of(self, residual: torch.Tensor, kernels: Backend = "auto") -> torch.Tensor:
        """Return the anchors [N, num_kv_heads, anchor_bytes] of raw residuals [N, num_kv_heads,
        residual_bytes], contiguous, encoded anew on their device, on a GPU by `kernels`. Do not
        wait for the device."""
        if residual.is_cuda:
            return self._anchors_by_kernel(residual, kernels)
        anchors = self.anchor_layout.empty_records(residual.shape[:2], residual.device)
        for some in self._at_once(residual):
            k, v = exact.decode(residual[some], self.raw_layout)
            anchors[some], _ = reference_of(self.settings).encode(
                k, v, self.settings, self.anchor_layout
            )
        return anchors

    def pack(self, anchor: torch.Tensor, residual: torch.Tensor) -> PackedRecords:
        """Pack raw residuals [N, num_kv_heads, residual_bytes] of pages whose anchors are `anchor`
        [N, num_kv_heads, anchor_bytes], on their device."""
        records, fits = self.pack_records(anchor, residual)
        return PackedRecords(records, fits, self.v_of(residual)[~fits])

    def pack_records(
        self, anchor: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return records and fits of pack(). Do not wait for the device."""
        if residual.is_cuda:
            return self._pack_by_kernel(anchor, residual)
        records = residual.new_empty(*residual.shape[:2], self.record_bytes)
        fits = torch.empty(residual.shape[:2], dtype=torch.bool)
        for some in self._at_once(residual):
            k, v = exact.decode(residual[some], self.raw_layout)
            packed = packed_exact.encode(k, v, *self._known(anchor[some]))
            records[some], fits[some] = packed.records, packed.fits
        return records, fits

    def v_of(self, residual: torch.Tensor) -> torch.Tensor:
        """Return a view of raw V of raw residuals [..., residual_bytes]: [..., raw_v_bytes]."""
        return residual[..., self.raw_v_bytes : 2 * self.raw_v_bytes]

    def unpack(
        self, anchor: torch.Tensor, records: torch.Tensor, raw_v: torch.Tensor
    ) -> torch.Tensor:
        """Return the raw residuals that pack() was given, on their device. Records that no pack()
        made give garbage, and raise nothing."""
        unfit = ~self.fits(records)
        return self.unpack_records(
            anchor, records, raw_v, unfit.flatten().cumsum(0).view(unfit.shape)
        )

    def unpack_records(
        self,
        anchor: torch.Tensor,
        records: torch.Tensor,
        raw_v: torch.Tensor,
        ranks: torch.Tensor,
    ) -> torch.Tensor:
        """Return unpack() with rows of raw_v in any order. ranks: [N, num_kv_heads] int64, the row
        of each record that does not fit, counted from 1. Do not wait for the device."""
        if records.is_cuda:
            return self._unpack_by_kernel(anchor, records, raw_v, ranks)
        num_pages, heads = records.shape[:2]
        residual = self.raw_layout.empty_records((num_pages, heads), records.device)
        # A row of zeros in place of missing ones.
        rows = torch.nn.functional.pad(raw_v, (0, 0, 0, 1))
        for some in self._at_once(records):
            unfit = ~self.fits(records[some])
            of_page = rows[(ranks[some][unfit] - 1).clamp(max=len(raw_v))]
            pages = packed_exact.decode(records[some], of_page, *self._known(anchor[some]))
            residual[some] = exact.encode(*pages, self.raw_layout)
        return residual

    def unpacker(self, raw: torch.Tensor, anchors: torch.Tensor) -> Unpack:
        """Return a function that unpacks records beside rows of `anchors` into rows of `raw`: pools
        of [S, layers, num_kv_heads, bytes] uint8 on one device. It sets the n layers from
        first_layer on of raw[raw_rows[i]] to unpack_records() of records[i] beside
        anchors[anchor_rows[i]], in place, and does not wait for the device.

        raw_rows, anchor_rows: [N] int64. records: [N, n, num_kv_heads, record_bytes] uint8. ranks:
        [N, layers, num_kv_heads] int32.
        """
        if raw.is_cuda:
            return self._unpacker_by_kernel(raw, anchors)

        def unpack_rows(
            raw_rows: torch.Tensor,
            anchor_rows: torch.Tensor,
            records: torch.Tensor,
            raw_v: torch.Tensor,
            ranks: torch.Tensor,
            first_layer: int,
        ) -> None:
            layers = slice(first_layer, first_layer + records.shape[1])
            known = anchors[:, layers][anchor_rows].flatten(1, 2)
            ranks = ranks[:, layers].flatten(1, 2)
            unpacked = self.unpack_records(known, records.flatten(1, 2), raw_v, ranks)
            raw[raw_rows, layers] = unpacked.view(*records.shape[:3], -1)

        return unpack_rows

    def _unpacker_by_kernel(self, raw: torch.Tensor, anchors: torch.Tensor) -> Unpack:
        from kvspec_kernels.ops.packed_exact import Unpacker

        return Unpacker(raw, anchors, self.anchor_layout, self.layout)

    def _anchors_by_kernel(self, residual: torch.Tensor, kernels: Backend) -> torch.Tensor:
        # Late import, as below.
        from kvspec_kernels.ops.encode import encode_pages

        sizes = (self.layout.page_size, self.layout.head_dim)
        parts = torch.unflatten(residual.view(self.layout.dtype), -1, (2, *sizes))
        k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        anchors = self.anchor_layout.empty_records(residual.shape[:2], residual.device)
        index = torch.arange(len(residual), dtype=torch.int32, device=residual.device)
        # The kernel copies raw bits, here to where they are.
        places = (anchors, index, residual, index)
        encode_pages(k, v, index, *places, self.settings, "exact", kernels)
        return anchors

    def _pack_by_kernel(
        self, anchor: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Late import: servers on a CPU have no Triton.
        from kvspec_kernels.ops.packed_exact import pack

        raw, shape = residual.flatten(0, 1), residual.shape[:2]
        records, fits = pack(anchor.flatten(0, 1), raw, self.anchor_layout, self.layout)
        return torch.unflatten(records, 0, shape), fits.view(shape)

    def _unpack_by_kernel(
        self,
        anchor: torch.Tensor,
        records: torch.Tensor,
        raw_v: torch.Tensor,
        ranks: torch.Tensor,
    ) -> torch.Tensor:
        from kvspec_kernels.ops.packed_exact import unpack

        raw = unpack(
            anchor.flatten(0, 1),
            records.flatten(0, 1),
            raw_v,
            self.anchor_layout,
            self.layout,
            ranks.flatten(),
        )
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
