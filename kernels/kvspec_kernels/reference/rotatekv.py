"""RotateKV's anchors (arXiv 2501.16383) in plain torch: heads are rotated by a Hadamard matrix,
then quantised to asymmetric integers per token.

The rotation spreads the large channels of K and V over the head, so that few bits reach all values
of a token. Scale, zero and codes are those of `integer_groups.py`, over a head or half of it. The
paper defines no correction to 8 bits.

Decoding rotates back. A kernel would read rotated values and rotate query and output instead: see
`hadamard.py`, and decode_rotated.

Three parts of the paper are left out:
- Channels are not reordered by how large they are, because the order comes from calibration.
- Heads are not rotated in groups before the rotary embedding: a record holds one head, and K behind
  the embedding.
- Tokens that are attention sinks have no more bits than others, because an encoder knows neither
  positions nor activations.
"""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.rotatekv import RotateKVSettings
from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference import bit_packing, hadamard, integer_groups, rows

# Larger values are clipped. Rotating there and back grows a value 256 times at most, and fp32 must
# hold the result.
LARGEST = torch.finfo(torch.float32).max / 512


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: RotateKVSettings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout | None = None,
) -> tuple[torch.Tensor, None]:
    """Encode pages k, v [N, P, H, D] into anchor records [N, H, nbytes] uint8."""
    anchors = anchor_layout.empty_records((k.shape[0], k.shape[2]), k.device)
    top = (1 << settings.anchor_bits) - 1
    for part, pages in (("k", k), ("v", v)):
        rotated = hadamard.rotate(rows.by_head(pages).clamp_(-LARGEST, LARGEST))
        groups = _grouped(rotated, part, anchor_layout)
        scale, zero = integer_groups.scale_and_zero(groups, 4, top)
        anchor_layout[f"{part}_scale"].view(anchors).copy_(scale.squeeze(4))
        anchor_layout[f"{part}_zero"].view(anchors).copy_(zero.squeeze(4))
        codes = integer_groups.codes(groups, scale, zero, top).flatten(3)
        packed = bit_packing.pack(codes, settings.anchor_bits)
        anchor_layout[f"{part}_codes"].view(anchors).copy_(packed)
    return anchors, None


def decode_anchor(
    anchors: torch.Tensor, settings: RotateKVSettings, layout: RecordLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor records [N, H, nbytes] into pages (k, v) [N, P, H, D] `dtype`."""
    k, v = (
        rows.to_pages(hadamard.rotate(values), dtype)
        for values in decode_rotated(anchors, settings, layout)
    )
    return k, v


def decode_rotated(
    anchors: torch.Tensor, settings: RotateKVSettings, layout: RecordLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor records [N, H, nbytes] into new rotated K and V [N, H, P, D] fp32."""

    def part(name: str) -> torch.Tensor:
        packed = layout[f"{name}_codes"].view(anchors)
        codes = bit_packing.unpack(packed, settings.anchor_bits).float()
        scale, zero = (
            layout[f"{name}_{field}"].view(anchors).float()[..., None]
            for field in ("scale", "zero")
        )
        return _grouped(codes, name, layout).mul_(scale).add_(zero).flatten(3)

    return part("k"), part("v")


def _grouped(values: torch.Tensor, part: str, layout: RecordLayout) -> torch.Tensor:
    """Return values [N, H, P, D] as a view [N, H, P, groups, channels of a group]."""
    return torch.unflatten(values, 3, (layout[f"{part}_scale"].shape[1], -1))
