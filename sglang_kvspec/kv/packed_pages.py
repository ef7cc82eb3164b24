"""Packed residuals of whole pages, on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PackedPages(NamedTuple):
    """Packed residuals of pages on the CPU. records: [num_pages, num_layers, num_kv_heads,
    record_bytes] uint8. fits: which of them fit, bool. raw_v: V of the others, in their order,
    [number of them, raw_v_bytes] uint8."""

    records: torch.Tensor
    fits: torch.Tensor
    raw_v: torch.Tensor
