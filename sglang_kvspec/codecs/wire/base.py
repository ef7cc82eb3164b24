"""The interface between wire codecs and the code that sends or receives pages."""

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
    """Return [num_layers, page_size, num_kv_heads, head_dim], the shape of a page's K or V."""
    return geometry.num_layers, geometry.page_size, geometry.num_kv_heads, geometry.head_dim


def page_elements(geometry: PageGeometry) -> int:
    """Return the number of elements in a page's K or V."""
    return math.prod(page_shape(geometry))


class WireCodec(Protocol):
    """Stateless codec between a page of KV and self-contained bytes.

    k, v: [num_layers, page_size, num_kv_heads, head_dim] on the CPU in the model's KV dtype, of any
    strides. Every token of a page is encoded. The sender of a page that is not full yet fills the
    rest with numbers, best with copies of its last token.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_page_bytes(self) -> int:
        """Most bytes of an encoded page. Every page has exactly as many, except in `cachegen`."""
        ...

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return one page as contiguous uint8 [nbytes]. Equal pages give equal bytes. Raises
        CodecError for tensors of another shape or dtype and, except in `full`, for NaN and inf."""
        ...

    def decode(self, payload: torch.Tensor) -> KV:
        """Return the (k, v) that a decode server computes with: fresh, contiguous, in the KV dtype,
        finite unless the codec is `full`. Raises CodecError for bytes that cannot be read as a page
        of this geometry. Time and memory depend on the geometry alone."""
        ...

    def encode_pages(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Encode N pages at once, k and v [N, num_layers, page_size, num_kv_heads, head_dim] on any
        device. The codec works on that device as far as it can, and the CPU waits for it."""
        ...

    def decode_pages(self, payloads: Sequence[torch.Tensor], device: torch.device) -> KV:
        """Decode N pages at once, at least one. Return (k, v), each [N, num_layers, page_size,
        num_kv_heads, head_dim], of equal strides, on the device. The CPU does not wait for it."""
        ...
