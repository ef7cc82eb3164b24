"""The module that a codec names as its `reference`: what it holds, and how it is found."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import RecordLayout

KV = tuple[torch.Tensor, torch.Tensor]


class ReferenceCodec(Protocol):
    """Encodes and decodes records in plain torch, on any device. settings: the CodecSpec; layouts:
    as formats.anchor_layout and formats.residual_layout make them of it."""

    def encode(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        settings: Any,
        anchor_layout: RecordLayout,
        residual_layout: RecordLayout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Pages k, v [N, P, H, D] into anchor records [N, H, nbytes] uint8, and residual records of
        the target int8 where their layout is given. Unused bytes are zero."""
        ...

    def decode_anchor(
        self, anchors: torch.Tensor, settings: Any, layout: RecordLayout, dtype: torch.dtype
    ) -> KV:
        """Anchor records [N, H, nbytes] into new pages (k, v) [N, P, H, D] `dtype`."""
        ...

    def decode_refined(
        self,
        anchors: torch.Tensor,
        residuals: torch.Tensor,
        settings: Any,
        anchor_layout: RecordLayout,
        residual_layout: RecordLayout,
        dtype: torch.dtype,
    ) -> KV:
        """Anchor and int8 residual records into new pages (k, v) [N, P, H, D] `dtype`."""
        ...


@dataclass(frozen=True, slots=True)
class IntegerPart:
    """K or V of pages as offset + scale * (code - zero): codes [N, H, P, D] integers in fp64;
    scale and offset fp64, of the same shape up to broadcasting."""

    codes: torch.Tensor
    zero: float
    scale: torch.Tensor
    offset: torch.Tensor


class KernelReference(ReferenceCodec, Protocol):
    """Reference of a codec that has kernels, for them and their tests."""

    def integer_edges(self, settings: Any) -> list[float]:
        """Where magnitudes go up by one integer, for jit/encode.py; none for a uniform codec."""
        ...

    def code_values(
        self, settings: Any, device: torch.device, *, refined: bool
    ) -> torch.Tensor | None:
        """Values of anchor codes, or of these with their corrections, in units of the scale: a
        table for jit/pages.py. None where it computes them."""
        ...

    def integer_part(
        self, name: str, anchors: torch.Tensor, settings: Any, layout: RecordLayout
    ) -> IntegerPart:
        """Part "k" or "v" of anchor records [N, H, nbytes], for drafts on codes."""
        ...


def reference_of(spec: CodecSpec) -> ReferenceCodec:
    """The reference of a codec."""
    return cast("ReferenceCodec", import_module(spec.reference))


def kernel_reference_of(spec: CodecSpec) -> KernelReference:
    """The reference of a codec that has kernels."""
    assert spec.has_kernels, f"the codec {spec.name} has reference functions alone"
    return cast("KernelReference", import_module(spec.reference))
