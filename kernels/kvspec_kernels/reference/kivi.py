"""KIVI's anchors (arXiv 2402.02750) in plain torch: asymmetric integers of 2 to 4 bits.

K has one scale and zero per channel and group of 32 tokens, V one per token and group of 32
channels. Scale s = (max - min) / (2^bits - 1) and zero z = min of the group; a code is the nearest
integer to (x - z) / s, and a draft reads code * s + z. The paper defines no correction to 8 bits.

The paper's code keeps s and z in the dtype of the cache, which is fp16 in its experiments. Here
they are bf16: the same bytes, and the range of every KV dtype. Codes are chosen against s and z as
stored. So a value errs by half a step at most, plus what rounding moved z and the largest value.
The paper's residual, its newest tokens in full precision, is KVSpec's recent window.
"""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.kivi import KiviSettings
from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference import integer_groups, rows


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: KiviSettings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout | None = None,
) -> tuple[torch.Tensor, None]:
    """Encode pages k, v [N, P, H, D] into anchor records [N, H, nbytes] uint8."""
    anchors = anchor_layout.empty_records((k.shape[0], k.shape[2]), k.device)
    for part, pages in (("k", k), ("v", v)):
        groups, dim = _grouped(rows.by_head(pages), part, anchor_layout)
        integer_groups.write(anchors, anchor_layout, part, groups, dim, settings.anchor_bits)
    return anchors, None


def decode_anchor(
    anchors: torch.Tensor, settings: KiviSettings, layout: RecordLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor records [N, H, nbytes] into pages (k, v) [N, P, H, D] `dtype`."""

    def part(name: str) -> torch.Tensor:
        values = integer_groups.read_codes(anchors, layout, name, settings.anchor_bits)
        groups, dim = _grouped(values, name, layout)
        integer_groups.restore(groups, anchors, layout, name, dim)
        return rows.to_pages(values, dtype)

    return part("k"), part("v")


def _grouped(values: torch.Tensor, part: str, layout: RecordLayout) -> tuple[torch.Tensor, int]:
    """Return a view of values [N, H, P, D] in which one dimension runs over a group, and that
    dimension: K [N, H, groups, tokens, D], V [N, H, P, groups, channels]."""
    if part == "k":
        return torch.unflatten(values, 2, (layout["k_scale"].shape[0], -1)), 3
    return torch.unflatten(values, 3, (layout["v_scale"].shape[1], -1)), 4
