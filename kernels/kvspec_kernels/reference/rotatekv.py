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
from kvspec_kernels.reference import hadamard, integer_groups, rows

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
    for part, pages in (("k", k), ("v", v)):
        rotated = hadamard.rotate(rows.by_head(pages).clamp_(-LARGEST, LARGEST))
        groups = _grouped(rotated, part, anchor_layout)
        integer_groups.write(anchors, anchor_layout, part, groups, 4, settings.anchor_bits)
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
        codes = integer_groups.read_codes(anchors, layout, name, settings.anchor_bits)
        groups = _grouped(codes, name, layout)
        return integer_groups.restore(groups, anchors, layout, name, 4).flatten(3)

    return part("k"), part("v")


def _grouped(values: torch.Tensor, part: str, layout: RecordLayout) -> torch.Tensor:
    """Return values [N, H, P, D] as a view [N, H, P, groups, channels of a group]."""
    return torch.unflatten(values, 3, (layout[f"{part}_scale"].shape[1], -1))
