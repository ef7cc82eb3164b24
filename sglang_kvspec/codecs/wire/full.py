"""The bytes themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_kvspec.codecs.wire.base import KV, PageGeometry, page_elements, page_shape
from sglang_kvspec.codecs.wire.checks import check_page, owned_payload


@dataclass(frozen=True)
class FullWireCodec:
    """base.WireCodec that carries every bit, NaN and inf included: K's numbers, then V's."""

    name: ClassVar[str] = "full"
    is_lossless: ClassVar[bool] = True

    geometry: PageGeometry

    @property
    def max_page_bytes(self) -> int:
        return 2 * page_elements(self.geometry) * self.geometry.dtype.itemsize

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        check_page(self.geometry, k, v)
        return torch.stack((k, v)).view(torch.uint8).flatten()

    def decode(self, payload: torch.Tensor) -> KV:
        own = owned_payload(self.name, payload, self.max_page_bytes, self.max_page_bytes)
        k, v = own.view(self.geometry.dtype).view(2, *page_shape(self.geometry)).unbind()
        return k, v
