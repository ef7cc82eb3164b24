"""Four-bit codes in bytes, the low nibble first."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack the low 4 bits of integer codes [..., D] into uint8 [..., D / 2]. Negative codes are
    packed in two's complement."""
    low, high = codes[..., 0::2], codes[..., 1::2]
    return ((low & 15) | ((high & 15) << 4)).to(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [..., D / 2] into uint8 codes [..., D] in 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unpack_signed(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [..., D / 2] into int8 codes [..., D] in -8..7 (two's complement nibbles)."""
    # Arithmetic shifts copy the nibble's sign bit into the upper half of the byte.
    both = torch.stack((packed << 4, packed & 0xF0), dim=-1).flatten(-2)
    return both.view(torch.int8) >> 4


def pair_table(values: torch.Tensor) -> torch.Tensor:
    """Return a table [256, 2] fp32 of the two values of a byte. values: [16] fp32, one a code."""
    byte = torch.arange(256, device=values.device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)


def look_up(table: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return values [..., D] fp32 of packed codes uint8 [..., D / 2]. table: from `pair_table`.

    A pair is fetched as one 8-byte element, which halves the lookups and needs no unpacking.
    """
    pairs = table.view(torch.int64).flatten()
    return pairs[packed.int()].view(torch.float32)
