"""A codec of another package, in one file: the mean of each channel, and a sign for each value.

A server that has this folder on PYTHONPATH takes `--kvspec-codec toy`. Anchors have 1 bit a value.
The target `int8` adds the 8-bit error of each value. The codec has no kernels, so it serves on a
CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from kvspec_kernels.codecs import CodecSpec, FieldSpec
from kvspec_kernels.formats import RecordLayout

KV = tuple[torch.Tensor, torch.Tensor]

LARGEST_CODE = 127


@dataclass(frozen=True, slots=True)
class ToySettings(CodecSpec):
    """Settings of the codec, without parameters: a channel has one mean and size for the whole
    page."""

    name: ClassVar[str] = "toy"
    reference: ClassVar[str] = __name__
    bit_choices: ClassVar[tuple[int, ...]] = (1,)

    @property
    def anchor_bits(self) -> int:
        return 1

    @classmethod
    def for_page(cls, page_size: int, anchor_bits: int) -> Self:
        return cls()

    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        return tuple(
            field
            for part in "kv"
            for field in (
                FieldSpec(f"{part}_signs", (page_size, head_dim // 8), "uint8"),
                FieldSpec(f"{part}_mean", (head_dim,), "bfloat16"),
                FieldSpec(f"{part}_size", (head_dim,), "bfloat16"),
                FieldSpec(f"{part}_step", (head_dim,), "float32"),
            )
        )

    def correction_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        return tuple(FieldSpec(f"{part}_error", (page_size, head_dim), "int8") for part in "kv")


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: ToySettings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode pages; see kvspec_kernels.reference.codec.ReferenceCodec, also for the functions
    below."""
    leading = (k.shape[0], k.shape[2])
    anchors = anchor_layout.empty_records(leading, k.device)
    residuals = residual_layout.empty_records(leading, k.device) if residual_layout else None
    for part, pages in (("k", k), ("v", v)):
        values = pages.transpose(1, 2).float()  # [N, H, P, D]
        mean = (values / values.shape[2]).sum(2, keepdim=True).bfloat16().float()
        size = ((values - mean).abs() / values.shape[2]).sum(2, keepdim=True).bfloat16().float()
        is_above = values >= mean
        error = values - torch.where(is_above, mean + size, mean - size)
        step = error.abs().amax(2, keepdim=True) / LARGEST_CODE
        for name, stored in (("mean", mean), ("size", size), ("step", step)):
            anchor_layout[f"{part}_{name}"].view(anchors).copy_(stored.squeeze(2))
        anchor_layout[f"{part}_signs"].view(anchors).copy_(_packed(is_above))
        if residuals is not None and residual_layout is not None:
            codes = (error / torch.where(step > 0, step, 1.0)).round().nan_to_num(0.0)
            residual_layout[f"{part}_error"].view(residuals).copy_(codes)
    return anchors, residuals


def decode_anchor(
    anchors: torch.Tensor, settings: ToySettings, layout: RecordLayout, dtype: torch.dtype
) -> KV:
    return _pages(_anchor("k", anchors, layout), dtype), _pages(
        _anchor("v", anchors, layout), dtype
    )


def decode_refined(
    anchors: torch.Tensor,
    residuals: torch.Tensor,
    settings: ToySettings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout,
    dtype: torch.dtype,
) -> KV:
    def part(name: str) -> torch.Tensor:
        step = anchor_layout[f"{name}_step"].view(anchors)[..., None, :]
        error = residual_layout[f"{name}_error"].view(residuals) * step
        return _pages(_anchor(name, anchors, anchor_layout) + error, dtype)

    return part("k"), part("v")


def _anchor(part: str, anchors: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Return the draft values [N, H, P, D] fp32 of a part."""
    mean, size = (
        layout[f"{part}_{name}"].view(anchors)[..., None, :].float() for name in ("mean", "size")
    )
    is_above = _unpacked(layout[f"{part}_signs"].view(anchors))
    return torch.where(is_above, mean + size, mean - size)


def _pages(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).transpose(1, 2).to(dtype).contiguous()


def _packed(flags: torch.Tensor) -> torch.Tensor:
    """Pack flags [..., D] as uint8 [..., D / 8], lowest bit first."""
    bits = torch.unflatten(flags, -1, (-1, 8)).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(-1).to(torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of _packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts & 1) == 1).flatten(-2)
