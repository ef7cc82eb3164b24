"""Tokens that drafts read, by their scores."""

from __future__ import annotations

import math

import torch

from sglang_kvspec.scorers.base import ALWAYS, Allocation


def kept_tokens(
    scores: torch.Tensor, budget: float, allocation: Allocation, unit: int
) -> torch.Tensor:
    """Return which tokens drafts read, bool [num_layers, num_kv_heads, num_tokens]: those of
    kept_units(), whose arguments these are."""
    kept = kept_units(scores, budget, allocation, unit)
    return kept.repeat_interleave(unit, dim=-1)


def kept_units(
    scores: torch.Tensor, budget: float, allocation: Allocation, unit: int
) -> torch.Tensor:
    """Return which units drafts read, bool [num_layers, num_kv_heads, num_tokens / unit].

    scores: [num_layers, num_kv_heads, num_tokens] float32. Tokens are read in units of `unit`
    consecutive ones, by the sum of their scores; with a token of ALWAYS the whole unit is read. Of
    all other units the best are read, ceil(budget * units) a head on average. Among equal sums, the
    earlier unit is read. With the allocation `same` a unit is worth the sum over all heads, and one
    that any head reads in any case is read by all. num_tokens must be a multiple of `unit`.
    """
    num_layers, num_heads = scores.shape[:2]
    by_unit = scores.reshape(num_layers, num_heads, -1, unit)
    always = by_unit.amax(-1) == ALWAYS
    # Finite sums, so that units that are read in any case rank below all others. The sums of those
    # do not count.
    lowest = torch.finfo(scores.dtype).min
    sums = by_unit.sum(-1).clamp(min=lowest)
    if allocation == "same":
        always = always.any(0).any(0).expand(1, 1, -1)
        sums = sums.sum((0, 1)).clamp(min=lowest).expand(1, 1, -1)
        return _best_units(sums, always, budget, "head").expand(num_layers, num_heads, -1)
    return _best_units(sums, always, budget, allocation)


def _best_units(
    sums: torch.Tensor, always: torch.Tensor, budget: float, allocation: Allocation
) -> torch.Tensor:
    """Return kept_units() of finite sums and of units that are read in any case, both [num_layers,
    num_kv_heads, num_units]. allocation: any but `same`."""
    num_layers, num_heads, num_units = sums.shape
    # Units of one row compete with one another.
    rows = {"head": (num_layers * num_heads, 1), "layer": (num_layers, num_heads)}
    num_rows, heads = rows.get(allocation, (1, num_layers * num_heads))
    ranked = sums.masked_fill(always, -ALWAYS).reshape(num_rows, heads * num_units)
    best = ranked.sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(ranked, dtype=torch.bool)
    kept.scatter_(-1, best[:, : heads * math.ceil(budget * num_units)], True)
    return kept.view(num_layers, num_heads, num_units) | always
