"""Forms of residuals outside of a KV cache: in slots of prefix stores, and on wires.

A slot has one size, which all pages of a store share. On a wire a page has as many bytes as it
needs, and may be cut into parts with equal shares of the KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.codecs.packed_residual import PackedResidual
from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.record_transfers import RecordTransfers
from sglang_kvspec.planning.record_bytes import spare_rows


class ResidualForm(Protocol):
    """Form of the residuals of one codec and geometry. Reads and writes are those of `records`, and
    rows and payloads are uint8 on the CPU."""

    @property
    def name(self) -> str:
        """Name with a version, of lower-case letters, digits and underscores. Residuals are read in
        the form in which they were written."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of a page's slot."""
        ...

    def read_slots(self, records: RecordTransfers, pages: Sequence[int]) -> list[torch.Tensor]:
        """Return the slots of encoded pages, from the first one up to a page that needs more than a
        slot has, each [slot_bytes]."""
        ...

    def write_slots(
        self, records: RecordTransfers, pages: Sequence[int], slots: torch.Tensor
    ) -> None:
        """Store residuals of pages that land, whose anchors are there. slots: [N, slot_bytes], as
        read_slots() gave them; the caller must not change them afterwards. Others give garbage."""
        ...

    def part_bytes(self, num_parts: int) -> int:
        """Return the most bytes of one of num_parts parts of a page."""
        ...

    def check(self, parts: Sequence[torch.Tensor]) -> None:
        """Check the parts of a page, 1-D. Raises TransportError unless write_parts() can store
        them."""
        ...

    def read_parts(
        self, records: RecordTransfers, pages: Sequence[int], num_parts: int
    ) -> list[list[torch.Tensor]]:
        """Return the parts of each page, 1-D."""
        ...

    def write_parts(
        self,
        records: RecordTransfers,
        pages: Sequence[int],
        payloads: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Store residuals of pages that land, whose anchors are there. payloads: the parts of each
        page, as many for every page, which pass check()."""
        ...


def residual_form(codec: Codec, geometry: KVGeometry) -> ResidualForm:
    """Return the form that residuals of this codec have outside of a KV cache."""
    if codec.packed is not None:
        return PackedForm(codec.packed, geometry)
    return RawForm(codec, geometry)


class RawForm:
    """Residuals as they are in the KV cache."""

    name = "raw"

    def __init__(self, codec: Codec, geometry: KVGeometry) -> None:
        self._shape = (geometry.num_layers, geometry.num_kv_heads, codec.residual_bytes)

    @property
    def slot_bytes(self) -> int:
        layers, heads, record_bytes = self._shape
        return layers * heads * record_bytes

    def read_slots(self, records: RecordTransfers, pages: Sequence[int]) -> list[torch.Tensor]:
        return list(records.read_residuals(pages).flatten(1))

    def write_slots(
        self, records: RecordTransfers, pages: Sequence[int], slots: torch.Tensor
    ) -> None:
        records.write_residuals(pages, slots.view(-1, *self._shape))

    def part_bytes(self, num_parts: int) -> int:
        return self.slot_bytes // num_parts

    def check(self, parts: Sequence[torch.Tensor]) -> None:
        check_equal_parts(parts, self.part_bytes(len(parts)))

    def read_parts(
        self, records: RecordTransfers, pages: Sequence[int], num_parts: int
    ) -> list[list[torch.Tensor]]:
        return parts_of_heads(records.read_residuals(pages), num_parts)

    def write_parts(
        self,
        records: RecordTransfers,
        pages: Sequence[int],
        payloads: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        records.write_residuals(pages, joined_heads(payloads, self._shape, records.is_on_gpu))


class PackedForm:
    """Packed records of all layers and KV heads, then V of those that do not fit, in their order.
    A slot has room for V of one of RECORDS_A_SPARE records, and zeros behind the last one.

    num_records: records of a page. num_spare: how many of them may not fit, in a slot.
    """

    def __init__(self, packed: PackedResidual, geometry: KVGeometry) -> None:
        self._packed = packed
        self._shape = (geometry.num_layers, geometry.num_kv_heads, packed.record_bytes)
        self.num_records = geometry.num_layers * geometry.num_kv_heads
        self.num_spare = spare_rows(self.num_records)

    @property
    def name(self) -> str:
        return self._packed.form

    @property
    def slot_bytes(self) -> int:
        return self._bytes(self.num_records, self.num_spare)

    def _bytes(self, num_records: int, num_unfit: int) -> int:
        packed = self._packed
        return num_records * packed.record_bytes + num_unfit * packed.raw_v_bytes

    def read_slots(self, records: RecordTransfers, pages: Sequence[int]) -> list[torch.Tensor]:
        slots = []
        for (payload,) in self.read_parts(records, pages, 1):
            missing = self.slot_bytes - payload.numel()
            if missing < 0:
                break
            slots.append(torch.nn.functional.pad(payload, (0, missing)))
        return slots

    def write_slots(
        self, records: RecordTransfers, pages: Sequence[int], slots: torch.Tensor
    ) -> None:
        end, row_bytes = self._packed_bytes(1), self._packed.raw_v_bytes
        packed = slots[:, :end].reshape(len(slots), *self._shape)
        spare = slots[:, end:].reshape(len(slots), self.num_spare, row_bytes)
        unfit = (~self._packed.fits(packed)).flatten(1).sum(1).tolist()
        # A slot of foreign bytes may miss more rows than it has. It must not take those of others.
        raw_v = [
            torch.nn.functional.pad(rows[:count], (0, 0, 0, max(count - self.num_spare, 0)))
            for rows, count in zip(spare, unfit, strict=True)
        ]
        self._write(records, pages, packed, raw_v)

    def part_bytes(self, num_parts: int) -> int:
        num_records = self.num_records // num_parts
        return self._bytes(num_records, num_records)

    def check(self, parts: Sequence[torch.Tensor]) -> None:
        sizes, least = [part.numel() for part in parts], self._packed_bytes(len(parts))
        for part in parts:
            if part.numel() < least:
                break
            records = part[:least].view(-1, self._packed.record_bytes)
            num_unfit = int((~self._packed.fits(records)).sum())
            if part.numel() != least + num_unfit * self._packed.raw_v_bytes:
                break
        else:
            return
        raise TransportError(
            f"the parts of a page have {sizes} bytes, expected {least} each and "
            f"{self._packed.raw_v_bytes} more for each record that does not fit"
        )

    def _packed_bytes(self, num_parts: int) -> int:
        """Return the bytes of the packed records in one of num_parts parts of a page."""
        return self._bytes(self.num_records // num_parts, 0)

    def read_parts(
        self, records: RecordTransfers, pages: Sequence[int], num_parts: int
    ) -> list[list[torch.Tensor]]:
        packed = records.read_packed(pages)
        unfit = ~packed.fits
        raw_v = packed.raw_v.split_with_sizes(unfit.flatten(1).sum(1).tolist())
        payloads = []
        for page, page_unfit, page_v in zip(packed.records, unfit, raw_v, strict=True):
            # The share of the heads that each row of V belongs to.
            owner = page_unfit.nonzero()[:, 1] * num_parts // self._shape[1]
            payloads.append(
                [
                    torch.cat((heads.reshape(-1), page_v[owner == i].flatten()))
                    for i, heads in enumerate(page.chunk(num_parts, dim=1))
                ]
            )
        return payloads

    def write_parts(
        self,
        records: RecordTransfers,
        pages: Sequence[int],
        payloads: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        num_parts = len(payloads[0])
        layers, heads, record_bytes = self._shape
        shape = (layers, heads // num_parts, record_bytes)
        end = self._packed_bytes(num_parts)
        # [pages, parts, layers, heads of a part, bytes]
        parts = torch.stack([torch.stack([part[:end] for part in page]) for page in payloads])
        packed = parts.view(len(pages), num_parts, *shape)
        rows = [[part[end:].view(-1, self._packed.raw_v_bytes) for part in p] for p in payloads]
        unfit = ~self._packed.fits(packed)
        raw_v = []
        for page_unfit, page_rows in zip(unfit, rows, strict=True):
            # Rows come part by part, and are written layer by layer.
            order = page_unfit.nonzero()[:, 1].argsort(stable=True)
            raw_v.append(torch.cat(page_rows)[order])
        self._write(records, pages, packed.transpose(1, 2).flatten(2, 3), raw_v)

    def _write(
        self,
        records: RecordTransfers,
        pages: Sequence[int],
        packed: torch.Tensor,
        raw_v: Sequence[torch.Tensor],
    ) -> None:
        none = torch.empty((0, self._packed.raw_v_bytes), dtype=torch.uint8)
        records.write_packed(pages, packed, torch.cat((none, *raw_v)))


def check_equal_parts(parts: Sequence[torch.Tensor], size: int) -> None:
    """Raise TransportError unless all parts of a page have `size` bytes."""
    sizes = [part.numel() for part in parts]
    if set(sizes) != {size}:
        raise TransportError(f"the parts of a page have {sizes} bytes, expected {size} each")


def parts_of_heads(records: torch.Tensor, num_parts: int) -> list[list[torch.Tensor]]:
    """Return records [N, num_layers, num_kv_heads, record_bytes] as num_parts parts a page, 1-D."""
    return [[part.reshape(-1) for part in page.chunk(num_parts, dim=1)] for page in records]


def joined_heads(
    payloads: Sequence[Sequence[torch.Tensor]], shape: Sequence[int], is_pinned: bool
) -> torch.Tensor:
    """Invert parts_of_heads(), in new memory. shape: (num_layers, num_kv_heads, record_bytes).
    is_pinned: a GPU can copy from the result without blocking the CPU."""
    layers, heads, record_bytes = shape
    num_heads = heads // len(payloads[0])
    records = torch.empty((len(payloads), *shape), dtype=torch.uint8, pin_memory=is_pinned)
    for place, parts in enumerate(zip(*payloads, strict=True)):
        views = [part.view(layers, num_heads, record_bytes) for part in parts]
        torch.stack(views, out=records.narrow(2, place * num_heads, num_heads))
    return records
