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
        return self._turned(x, positions, 1)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._turned(x, positions, -1)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor, sign: int) -> torch.Tensor:
        known = positions.clamp(max=len(self.cos_sin) - 1)
        cos, sin = self.cos_sin[known].to(x.dtype)[:, None].chunk(2, dim=-1)
        sin = sin * sign
        dim = self.cos_sin.shape[1]
        turned, rest = x[..., :dim], x[..., dim:]
        if self.in_halves:
            first, second = turned.chunk(2, dim=-1)
        else:
            first, second = turned[..., ::2], turned[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.cat(pair, -1) if self.in_halves else torch.stack(pair, -1).flatten(-2)
        return torch.cat((joined, rest), dim=-1)
