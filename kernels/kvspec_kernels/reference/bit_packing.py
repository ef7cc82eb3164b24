"""Codes of 1 to 8 bits in bytes, without gaps: code i takes the bits from bit i * bits on, and the
first bit of a byte is its lowest."""

from __future__ import annotations

from math import gcd

import torch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integer codes 0..2^bits - 1 [..., D] into uint8 [..., D * bits / 8]. D * bits must be a
    multiple of 8."""
    num_codes, num_bytes = _unit(bits)
    units = torch.unflatten(codes.to(torch.int32), -1, (-1, num_codes))
    words = (units << _shifts(num_codes, bits, codes.device)).sum(-1, dtype=torch.int32)
    return (words[..., None] >> _shifts(num_bytes, 8, codes.device)).to(torch.uint8).flatten(-2)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack uint8 [..., D * bits / 8] into int32 codes [..., D]."""
    num_codes, num_bytes = _unit(bits)
    units = torch.unflatten(packed.to(torch.int32), -1, (-1, num_bytes))
    words = (units << _shifts(num_bytes, 8, packed.device)).sum(-1, dtype=torch.int32)
    mask = (1 << bits) - 1
    return (words[..., None] >> _shifts(num_codes, bits, packed.device) & mask).flatten(-2)


def _unit(bits: int) -> tuple[int, int]:
    """Return the codes and the bytes of the smallest whole unit."""
    shared = gcd(bits, 8)
    return 8 // shared, bits // shared


def _shifts(count: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, count * step, step, dtype=torch.int32, device=device)
