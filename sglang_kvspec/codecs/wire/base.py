"""The interface between wire codecs and whoever sends or receives pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

KV = tuple[torch.Tensor, torch.Tensor]


class PageGeometry(Protocol):
    """The shape of one rank's KV cache; num_kv_heads counts the heads of this rank."""

    @property
    def num_layers(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


def page_shape(geometry: PageGeometry) -> tuple[int, int, int, int]:
    """[num_layers, page_size, num_kv_heads, head_dim]: K of a page, or V."""
    return geometry.num_layers, geometry.page_size, geometry.num_kv_heads, geometry.head_dim


def page_elements(geometry: PageGeometry) -> int:
    """Numbers in K of a page, or in V."""
    return math.prod(page_shape(geometry))


class WireCodec(Protocol):
    """Turns a page of KV into bytes that stand for themselves, and back. Holds no state.

    k, v: [num_layers, page_size, num_kv_heads, head_dim] on the CPU in the model's KV dtype, of any
    strides. Every token of a page is encoded: whoever sends a page that is not full yet fills the
    rest with numbers, best with copies of its last token.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_page_bytes(self) -> int:
        """No encoded page is longer. All are exactly as long, but for `cachegen`."""
        ...

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One page as contiguous uint8 [nbytes]. Equal pages give equal bytes. Raises CodecError
        for tensors of another shape or dtype and, but for `full`, for NaN and inf."""
        ...

    def decode(self, payload: torch.Tensor) -> KV:
        """What a decode server computes with: fresh, contiguous (k, v) in the KV dtype, finite
        unless the codec is `full`. Raises CodecError for bytes that cannot be read as a page of
        this geometry, in a time and memory that depend on the geometry alone."""
        ...

    def encode_pages(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """encode() of N pages at once, k and v [N, num_layers, page_size, num_kv_heads, head_dim]
        on any device: there as far as the codec can, which the CPU waits for."""
        ...

    def decode_pages(self, payloads: Sequence[torch.Tensor], device: torch.device) -> KV:
        """decode() of N pages at once, at least one: (k, v), each [N, num_layers, page_size,
        num_kv_heads, head_dim], of equal strides, on the device, which nobody waits for."""
        ...
