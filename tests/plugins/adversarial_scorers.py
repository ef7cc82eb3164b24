"""Scorers that choose as badly as they can. Output must not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_kvspec.scorers.base import ALWAYS, About, Allocation, LayerChunk, Needs


@dataclass(frozen=True, slots=True)
class KeepsNothing:
    about: ClassVar[About] = About("a test", "nothing", "none")
    needs: ClassVar[Needs] = Needs()
    allocation: ClassVar[Allocation] = "model"

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        size = (chunk.keys.shape[1], chunk.end)
        return chunk.keys.new_full(size, -ALWAYS, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class KeepsTheWrongHalf:
    """Keep what the newest query attends to least."""

    about: ClassVar[About] = About("a test", "what the newest query attends to least", "one row")
    needs: ClassVar[Needs] = Needs(drafting=True)
    allocation: ClassVar[Allocation] = "head"

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        heads = chunk.keys.shape[1]
        q = chunk.queries[-1].view(heads, -1, chunk.keys.shape[-1]).mean(1)
        return -torch.einsum("hd,nhd->hn", q, chunk.keys) * chunk.scale


@dataclass(frozen=True, slots=True)
class ChangesItsMind:
    """Keep other tokens after each verification, and at times all of a head."""

    about: ClassVar[About] = About("a test", "other tokens each time", "a second prefill")
    needs: ClassVar[Needs] = Needs(drafting=True, repeats=True)
    allocation: ClassVar[Allocation] = "layer"

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        rng = torch.Generator().manual_seed(chunk.end * 7 + chunk.layer)
        scores = torch.rand((chunk.keys.shape[1], chunk.end), generator=rng)
        scores[chunk.end % chunk.keys.shape[1]] = ALWAYS
        return scores
