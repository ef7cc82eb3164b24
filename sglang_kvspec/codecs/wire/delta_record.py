"""Byte layout of a `cachegen` record: a header, fields of fixed size, and symbols to its end.

    checksum      u64   XXH3-64 of all that follows
    nbytes        u32   of the whole record
    version       u16   VERSION
    coding        u8    how the symbols are written: Coding
    zero          u8
    step          [2 (K, V), layers]                          fp32
    anchor_scale  [2, layers, anchor tokens, heads]           bf16
    anchor_codes  [2, layers, anchor tokens, heads, channels] int8
    classes       [2, layers, heads, channels / 2]            nibbles, low one first
    symbols       [2, layers, heads, channels, other tokens]

All numbers are little endian. The checksum finds damage. The checks here and in symbols.py bound
what a forged record with a valid checksum can do.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference import nibbles
from sglang_kvspec.codecs.wire.base import PageGeometry, page_shape
from sglang_kvspec.codecs.wire.fields import lay_out
from sglang_kvspec.codecs.wire.symbols import Classes
from sglang_kvspec.core.errors import CodecError

# Raise this by one whenever bytes change meaning, the models of symbols.py included.
VERSION = 1
_HEADER = struct.Struct("<QIHBB")
_CHECKSUM_BYTES = 8


class Coding(enum.IntEnum):
    BYTES = 0
    ENTROPY = 1


@dataclass(frozen=True)
class DeltaRecord:
    """Fields of a record. step: [2, layers, 1, 1, 1] fp32. anchor_scale: [2, layers, anchor tokens,
    heads, 1] fp32. anchor_codes: [..., channels] int8. classes: of all channels in record order.
    body: symbols as `coding` writes them."""

    step: torch.Tensor
    anchor_scale: torch.Tensor
    anchor_codes: torch.Tensor
    classes: Classes
    coding: Coding
    body: bytes


@dataclass(frozen=True)
class DeltaRecordFormat:
    """Reader and writer of records of one geometry whose anchor tokens are anchor_every apart."""

    geometry: PageGeometry
    anchor_every: int
    layout: RecordLayout = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layers, tokens, heads, channels = page_shape(self.geometry)
        anchors = (2, layers, -(-tokens // self.anchor_every), heads)
        layout = lay_out(
            ("header", (_HEADER.size,), torch.uint8),
            ("step", (2, layers, 1, 1, 1), torch.float32),
            ("anchor_scale", (*anchors, 1), torch.bfloat16),
            ("anchor_codes", (*anchors, channels), torch.int8),
            ("classes", (2, layers, heads, channels // 2), torch.uint8),
        )
        # Derived once; a frozen dataclass sets its own fields this way.
        object.__setattr__(self, "layout", layout)

    @property
    def min_bytes(self) -> int:
        return self.layout.nbytes

    @property
    def max_bytes(self) -> int:
        """Bytes of a record with one byte a symbol. Entropy coding is used only where it takes
        less."""
        layers, tokens, heads, channels = page_shape(self.geometry)
        others = tokens - -(-tokens // self.anchor_every)
        return self.layout.nbytes + 2 * layers * heads * channels * others

    def write(self, record: DeltaRecord) -> torch.Tensor:
        """Return `record` as uint8 [nbytes]."""
        nbytes = self.layout.nbytes + len(record.body)
        payload = torch.empty(nbytes, dtype=torch.uint8)
        for name in ("step", "anchor_scale", "anchor_codes"):
            self.layout[name].view(payload).copy_(getattr(record, name))
        classes = self.layout["classes"]
        pairs = torch.from_numpy(record.classes).view(*classes.shape[:-1], -1)
        classes.view(payload).copy_(nibbles.pack(pairs))
        raw = payload.numpy()
        raw[self.layout.nbytes :] = np.frombuffer(record.body, np.uint8)
        _HEADER.pack_into(raw.data, 0, 0, nbytes, VERSION, record.coding, 0)
        struct.pack_into("<Q", raw.data, 0, _checksum(raw))
        return payload

    def read(self, payload: torch.Tensor) -> DeltaRecord:
        """Return the record in contiguous `payload` of at least min_bytes. The result shares its
        memory. Raises CodecError unless header and fields are valid."""
        raw = payload.numpy()
        checksum, nbytes, version, coding, zero = _HEADER.unpack_from(raw.data)
        if nbytes != raw.size:
            raise CodecError(
                f"the header of a cachegen record states {nbytes} bytes, got {raw.size} bytes"
            )
        if checksum != _checksum(raw):
            raise CodecError("the checksum of a cachegen record does not match its bytes")
        if version != VERSION or coding not in list(Coding) or zero != 0:
            raise CodecError(
                f"a cachegen record must have version {VERSION}, coding 0 or 1, and 0 as last "
                f"header field, got {version}, {coding} and {zero}"
            )
        step = self.layout["step"].view(payload)
        scale = self.layout["anchor_scale"].view(payload).float()
        for name, widths in (("steps", step), ("anchor scales", scale)):
            if not bool((widths.isfinite() & (widths >= 0)).all()):
                raise CodecError(f"cachegen {name} must be finite and not negative")
        return DeltaRecord(
            step=step,
            anchor_scale=scale,
            anchor_codes=self.layout["anchor_codes"].view(payload),
            classes=nibbles.unpack(self.layout["classes"].view(payload)).flatten().numpy(),
            coding=Coding(coding),
            body=raw[self.layout.nbytes :].tobytes(),
        )


def _checksum(raw: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(raw.data[_CHECKSUM_BYTES:])
