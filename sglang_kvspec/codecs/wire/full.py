"""Wire codec `full`: the raw bytes of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_kvspec.codecs.wire.base import KV, PageGeometry, page_elements, page_shape
from sglang_kvspec.codecs.wire.checks import check_page, check_pages, owned_payloads


@dataclass(frozen=True)
class FullWireCodec:
    """base.WireCodec that carries every bit, NaN and inf included: K's numbers, then V's."""

    name: ClassVar[str] = "full"

    geometry: PageGeometry

    @property
    def max_page_bytes(self) -> int:
        return 2 * page_elements(self.geometry) * self.geometry.dtype.itemsize

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        check_page(self.geometry, k, v)
        return self.encode_pages(k[None], v[None])[0]

    def decode(self, payload: torch.Tensor) -> KV:
        k, v = self.decode_pages([payload], payload.device)
        return k[0], v[0]

    def encode_pages(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        check_pages(self.geometry, k, v)
        return list(torch.stack((k, v), dim=1).flatten(1).view(torch.uint8).cpu())

    def decode_pages(self, payloads: Sequence[torch.Tensor], device: torch.device) -> KV:
        own = owned_payloads(self.name, payloads, self.max_page_bytes, device)
        values = own.to(device, non_blocking=True).view(self.geometry.dtype)
        k, v = values.view(len(own), 2, *page_shape(self.geometry)).unbind(1)
        return k, v
