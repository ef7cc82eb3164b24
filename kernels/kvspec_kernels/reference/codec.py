"""Protocols of the module that a codec names as its `reference`, and its lookup."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import RecordLayout

KV = tuple[torch.Tensor, torch.Tensor]


class ReferenceCodec(Protocol):
    """Functions that encode and decode records in plain torch, on any device.

    settings: the CodecSpec. layouts: made from it by formats.anchor_layout and residual_layout.
    """

    def encode(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        settings: Any,
        anchor_layout: RecordLayout,
        residual_layout: RecordLayout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode pages k, v [N, P, H, D] into anchor records [N, H, nbytes] uint8, and into
        residual records of the target int8 if their layout is given. Unused bytes are zero."""
        ...

    def decode_anchor(
        self, anchors: torch.Tensor, settings: Any, layout: RecordLayout, dtype: torch.dtype
    ) -> KV:
        """Decode anchor records [N, H, nbytes] into new pages (k, v) [N, P, H, D] `dtype`."""
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
        """Decode anchor and int8 residual records into new pages (k, v) [N, P, H, D] `dtype`.
        Absent from the module of a codec without correction_fields."""
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
    """Reference of a codec that has kernels. The kernels and their tests use it."""

    def encode_table(self, settings: Any, head_dim: int) -> list[float]:
        """Return numbers that jit/encode.py hands to the codec's functions, behind a 0, such as the
        magnitudes at which the code grows by one. Empty for a uniform codec."""
        ...

    def code_values(
        self, settings: Any, head_dim: int, device: torch.device, *, refined: bool
    ) -> torch.Tensor | None:
        """Return a table for jit/pages.py: values of anchor codes, or of codes with corrections if
        `refined`, in units of the scale. None if the kernel computes them. A codec that rotates
        adds the signs of its rotation, one for each channel."""
        ...

    def integer_part(
        self, name: str, anchors: torch.Tensor, settings: Any, layout: RecordLayout
    ) -> IntegerPart:
        """Return part "k" or "v" of anchor records [N, H, nbytes], for integer draft attention.
        Absent from the module of a codec that CUDA kernels do not draft from in integers."""
        ...


def reference_of(spec: CodecSpec) -> ReferenceCodec:
    """Return the reference module of a codec."""
    return cast("ReferenceCodec", import_module(spec.reference))


def kernel_reference_of(spec: CodecSpec) -> KernelReference:
    """Return the reference module of a codec that has kernels."""
    assert spec.has_kernels, f"the codec {spec.name} has no kernels, only reference functions"
    return cast("KernelReference", import_module(spec.reference))
