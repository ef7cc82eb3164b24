"""Wire codecs `int8` and `int4`: uniform integers with scale and zero point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference import nibbles
from sglang_kvspec.codecs.wire.base import KV, PageGeometry, page_shape
from sglang_kvspec.codecs.wire.checks import (
    check_magnitudes,
    check_page,
    check_pages,
    owned_payloads,
)
from sglang_kvspec.codecs.wire.fields import lay_out
from sglang_kvspec.codecs.wire.rounding import bf16_at_least, bf16_at_most
from sglang_kvspec.core.errors import CodecError

# Dimension of K or V along which elements share a scale and a zero point: a channel of K over the
# page's tokens, a token of V over the head's channels.
GROUP_DIM = {"k": -3, "v": -1}


@dataclass(frozen=True)
class UniformWireCodec:
    """base.WireCodec of `int8` and `int4`: codes u = round((x - zero) / scale) from 0 to
    2^bits - 1, which decode to u scale + zero.

    scale and zero are bf16. The zero is rounded down, then the scale up. So no value is cut off,
    and no error exceeds half a scale plus the KV dtype's own rounding. Where a group's range, or an
    end of it, exceeds bf16 or fp32, decoded values are finite, but their errors have no bound.
    A payload holds k_scale, k_zero, v_scale, v_zero, k_codes, v_codes of all layers, in the order
    of a page. Of two 4-bit codes the first is the low nibble.
    """

    geometry: PageGeometry
    bits: Literal[8, 4]
    layout: RecordLayout = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layers, tokens, heads, channels = page_shape(self.geometry)
        metadata = {"k": (layers, 1, heads, channels), "v": (layers, tokens, heads, 1)}
        code_shape = (layers, tokens, heads, channels * self.bits // 8)
        # Derived once; a frozen dataclass sets its own fields this way.
        layout = lay_out(
            *(
                (f"{part}_{name}", metadata[part], torch.bfloat16)
                for part in ("k", "v")
                for name in ("scale", "zero")
            ),
            *((f"{part}_codes", code_shape, torch.uint8) for part in ("k", "v")),
        )
        object.__setattr__(self, "layout", layout)

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def max_page_bytes(self) -> int:
        return self.layout.nbytes

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        check_page(self.geometry, k, v)
        return self.encode_pages(k[None], v[None])[0]

    def decode(self, payload: torch.Tensor) -> KV:
        k, v = self.decode_pages([payload], payload.device)
        return k[0], v[0]

    def encode_pages(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        check_pages(self.geometry, k, v)
        payloads = self.layout.empty_records((len(k),), k.device)
        for part, pages in (("k", k), ("v", v)):
            check_magnitudes(self.name, part.upper(), pages, torch.finfo(pages.dtype).max)
            self._encode_part(part, pages.float(), payloads)
        return list(payloads.cpu())

    def decode_pages(self, payloads: Sequence[torch.Tensor], device: torch.device) -> KV:
        own = owned_payloads(self.name, payloads, self.max_page_bytes, device)
        for part in ("k", "v"):
            self._check_metadata(part, own)
        there = own.to(device, non_blocking=True)
        return self._decode_part("k", there), self._decode_part("v", there)

    def _encode_part(self, part: str, x: torch.Tensor, payload: torch.Tensor) -> None:
        low, high = x.aminmax(dim=GROUP_DIM[part], keepdim=True)
        zero = bf16_at_most(low)
        # Divide by a tensor: for a number, torch on a GPU multiplies by its rounded reciprocal.
        scale = bf16_at_least((high - zero) / torch.full_like(low, self._top))
        # A zero scale means that every value of the group equals the zero point.
        step = torch.where(scale > 0, scale, 1.0)
        codes = ((x - zero) / step).round_().clamp_(0, self._top).to(torch.uint8)
        self.layout[f"{part}_scale"].view(payload).copy_(scale)
        self.layout[f"{part}_zero"].view(payload).copy_(zero)
        packed = codes if self.bits == 8 else nibbles.pack(codes)
        self.layout[f"{part}_codes"].view(payload).copy_(packed)

    def _check_metadata(self, part: str, payload: torch.Tensor) -> None:
        """Raise CodecError unless scales and zero points are valid. This runs on the CPU, because
        asking a device would mean waiting for it."""
        scale = self.layout[f"{part}_scale"].view(payload)
        zero = self.layout[f"{part}_zero"].view(payload)
        if not bool((scale.isfinite() & (scale >= 0) & zero.isfinite()).all()):
            raise CodecError(
                f"{self.name} scales and zero points of {part.upper()} must be finite, and scales "
                "must not be negative"
            )

    def _decode_part(self, part: str, payload: torch.Tensor) -> torch.Tensor:
        scale = self.layout[f"{part}_scale"].view(payload).float()
        zero = self.layout[f"{part}_zero"].view(payload).float()
        codes = self.layout[f"{part}_codes"].view(payload)
        codes = codes if self.bits == 8 else nibbles.unpack(codes)
        limit = torch.finfo(self.geometry.dtype).max
        values = codes.float().mul_(scale).add_(zero).clamp_(-limit, limit)
        return values.to(self.geometry.dtype)

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1
