"""The interface between codecs and everything that stores, moves or reads encoded pages."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from kvspec_kernels.codecs import CodecSpec
from sglang_kvspec.codecs.packed_residual import PackedResidual


class EncodedPages(NamedTuple):
    """Records of N pages. anchor: [N, num_kv_heads, anchor_bytes] uint8;
    residual: [N, num_kv_heads, residual_bytes] uint8. One record holds K and V of one KV head."""

    anchor: torch.Tensor
    residual: torch.Tensor


class Codec(Protocol):
    """Rule that splits full pages of K and V into anchors and residuals, and joins them again.

    Pages are [N, page_size, num_kv_heads, head_dim] in `dtype`, the model's KV dtype. A codec is
    bound to page size, head size, dtype and target when it is built (`codecs.registry.make_codec`)
    and holds no state. Layouts: kvspec_kernels.formats.
    """

    @property
    def name(self) -> str: ...

    @property
    def target(self) -> str: ...

    @property
    def page_size(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def settings(self) -> CodecSpec: ...

    @property
    def anchor_bytes(self) -> int:
        """Bytes of an anchor record: K and V of one page and KV head, metadata included."""
        ...

    @property
    def residual_bytes(self) -> int:
        """Bytes of a residual record of the codec's target."""
        ...

    @property
    def packed(self) -> PackedResidual | None:
        """The form of residuals outside of the KV cache; None: they stay as they are."""
        ...

    @property
    def anchor_bits_per_element(self) -> float:
        """Anchor bits per K or V element, metadata included."""
        ...

    def encode(self, k_pages: torch.Tensor, v_pages: torch.Tensor) -> EncodedPages:
        """Encode N pages. Raises CodecError on NaN or inf in debug mode. Otherwise the exact
        residual carries such a page bit-exactly, and its anchor is garbage."""
        ...

    def encode_exact(self, k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
        """Return the residual records of encode() for the target `exact`, without anchors."""
        ...

    def decode_exact(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages that encode_exact() was given, on any device. Only for the target
        `exact`. Same shapes as decode_anchor."""
        ...

    def decode_anchor(self, anchor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (k, v) that drafts attend to, each [N, page_size, num_kv_heads, head_dim] in
        `dtype`."""
        ...

    def decode_target(
        self, anchor: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (k, v) that verification and prefill attend to: bit-exact for `exact`, the 8-bit
        value for `int8`. Same shapes as decode_anchor."""
        ...
