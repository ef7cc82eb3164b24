"""The exact residual: raw bits of K and V in the model's KV dtype.

Nothing is computed: NaN, infinities, -0.0 and denormals survive, and every device decodes the same
bits. Decoding needs no anchor.
"""

from __future__ import annotations

import torch

from kvspec_kernels.formats import RecordLayout


def encode(k: torch.Tensor, v: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Encode pages k, v [N, P, H, D] of the layout's dtype into residual records [N, H, nbytes]
    uint8."""
    records = layout.empty_records((k.shape[0], k.shape[2]), k.device)
    for name, pages in (("k_bits", k), ("v_bits", v)):
        field = layout[name]
        assert pages.dtype == field.dtype, (pages.dtype, field.dtype)
        # Copy as integers: a float copy may quieten signalling NaNs.
        bits = _bits(field.dtype)
        field.view(records).view(bits).copy_(pages.view(bits).transpose(1, 2))
    return records


def decode(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode residual records [N, H, nbytes] into new pages (k, v) [N, P, H, D]."""
    pages = []
    for name in ("k_bits", "v_bits"):
        field = layout[name]
        bits = field.view(records).view(_bits(field.dtype))
        pages.append(bits.transpose(1, 2).contiguous().view(field.dtype))
    return pages[0], pages[1]


def _bits(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]
