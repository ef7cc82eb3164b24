"""A scorer of another package that notes how well what it is shown fits together.

Values are a linear function of the layer's input, and so are keys without their rotation: one
matrix explains all tokens of a chunk. That fails where inputs, positions or rotations are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from sglang_kvspec.scorers.base import About, Allocation, LayerChunk, Needs


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    """log: file to which a line is added for each chunk that is long enough: position of its first
    token, and the share of their norm that keys and values are off."""

    about: ClassVar[About] = About("a test", "the tokens with the largest values", "two fits")
    needs: ClassVar[Needs] = Needs(hidden=True, rotary=True, repeats=True, drafting=True)
    allocation: ClassVar[Allocation] = "model"

    log: str = ""

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        if self.log and chunk.hidden is not None:
            length, width = chunk.hidden.shape
            # Fewer tokens than channels always have a matrix that explains them.
            if length >= width + width // 4:
                with Path(self.log).open("a", encoding="utf-8") as file:
                    file.write(f"{chunk.start} {self._error(chunk)}\n")
        return chunk.values.norm(dim=-1).T

    def _error(self, chunk: LayerChunk) -> float:
        """Return the larger of both errors."""
        assert chunk.rotary is not None
        assert chunk.hidden is not None
        assert len(chunk.hidden) == len(chunk.queries), "hidden states of other tokens"
        keys = chunk.rotary.unrotate(chunk.keys[chunk.start :], chunk.positions)
        errors = []
        for part in (keys, chunk.values[chunk.start :]):
            wanted = part.flatten(1).double()
            weights = torch.linalg.lstsq(chunk.hidden.double(), wanted).solution
            errors.append((chunk.hidden.double() @ weights - wanted).norm() / wanted.norm())
        return float(max(errors))
