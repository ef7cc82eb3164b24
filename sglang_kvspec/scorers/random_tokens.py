"""Random tokens: the control that every other scorer has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_kvspec.scorers.base import About, Allocation, LayerChunk, Needs

# Odd constants of a multiplicative hash, and the bits that it keeps.
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
_BITS = 32


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Scorer by a hash of seed, layer, KV head and position, so that chunks and ranks agree."""

    about: ClassVar[About] = About("none: the control", "random tokens", "none")
    needs: ClassVar[Needs] = Needs(earlier=False)
    allocation: ClassVar[Allocation] = "head"

    seed: int = 0

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        device = chunk.keys.device
        heads = chunk.first_kv_head + torch.arange(chunk.keys.shape[1], device=device)
        positions = torch.arange(chunk.end, device=device)
        mixed = torch.zeros((len(heads), len(positions)), dtype=torch.int64, device=device)
        given: tuple[int | torch.Tensor, ...] = (
            self.seed % 2**_BITS,
            chunk.layer,
            heads[:, None],
            positions,
        )
        for value, factor in zip(given, _FACTORS, strict=True):
            mixed = ((mixed ^ value) * factor) & (2**_BITS - 1)
            mixed ^= mixed >> 15
        shares: torch.Tensor = mixed.float() / 2**_BITS
        return shares
