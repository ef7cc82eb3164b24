"""A scorer of another package that checks what it is shown of the model.

Values are a linear function of the layer's input, and so are keys without their rotation: one
matrix explains all tokens of a chunk. That fails where inputs, positions or rotations are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_kvspec.scorers.base import About, Allocation, LayerChunk, Needs

# Share of their norm that keys and values may be off, for rounding in fp32.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    about: ClassVar[About] = About("a test", "the tokens with the largest values", "two fits")
    needs: ClassVar[Needs] = Needs(hidden=True, rotary=True, repeats=True, drafting=True)
    allocation: ClassVar[Allocation] = "model"

    power: float = 2.0

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        if chunk.hidden is not None:
            self._check(chunk)
        return chunk.values.norm(p=self.power, dim=-1).T

    def _check(self, chunk: LayerChunk) -> None:
        assert chunk.rotary is not None
        length, width = chunk.hidden.shape
        assert length == len(chunk.queries), "hidden states of other tokens"
        if length < width + width // 4:
            return
        keys = chunk.rotary.unrotate(chunk.keys[chunk.start :], chunk.positions)
        for name, part in (("keys", keys), ("values", chunk.values[chunk.start :])):
            wanted = part.flatten(1).double()
            weights = torch.linalg.lstsq(chunk.hidden.double(), wanted).solution
            error = (chunk.hidden.double() @ weights - wanted).norm() / wanted.norm()
            assert error < TOLERANCE, f"{name} do not follow from hidden states: {error:.4f}"
