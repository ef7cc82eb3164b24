"""Rotary position embedding by a table of cosines and sines."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TableRotary:
    """scorers.base.Rotary by a table.

    cos_sin: [num_positions, rotary_dim], first the cosine, then the sine of every angle. Channels
    from rotary_dim on are not rotated. in_halves: channel i is rotated with channel i +
    rotary_dim / 2; otherwise neighbours are rotated with each other. Positions beyond the table
    turn like its last one.
    """

    cos_sin: torch.Tensor
    in_halves: bool

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self._at(positions, x.dtype)
        return self._turned(x, cos, sin)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self._at(positions, x.dtype)
        # Tables of some models, such as YaRN's, hold a factor besides the angle.
        length = cos.square() + sin.square()
        return self._turned(x, cos / length, -sin / length)

    def _at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        known = positions.clamp(max=len(self.cos_sin) - 1)
        cos, sin = self.cos_sin[known].to(dtype)[:, None].chunk(2, dim=-1)
        return cos, sin

    def _turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        dim = self.cos_sin.shape[1]
        turned, rest = x[..., :dim], x[..., dim:]
        if self.in_halves:
            first, second = turned.chunk(2, dim=-1)
        else:
            first, second = turned[..., ::2], turned[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.cat(pair, -1) if self.in_halves else torch.stack(pair, -1).flatten(-2)
        return torch.cat((joined, rest), dim=-1)
