"""Levels of a non-uniform quantiser, fitted to the values of a record by k-means.

Values from -1 to 1 are counted in bins, and k-means runs over the bins' centres. Counts and sums
are whole numbers, so all devices find the same levels in any order of additions.
"""

from __future__ import annotations

import torch

NUM_BINS = 256
# Levels of pages of normal values then move by less than a bin in an iteration.
ITERATIONS = 16


def fit(values: torch.Tensor, counted: torch.Tensor, bits: int) -> torch.Tensor:
    """Return 2^bits increasing levels [N, H, 2^bits] fp16 of values [N, H, M] fp32 in -1..1.

    counted: which values count, bool of the same shape. The start is a uniform grid. A level
    without values stays where it is.
    """
    centres = torch.arange(1 - NUM_BINS, NUM_BINS, 2, dtype=torch.float64, device=values.device)
    bins = ((values + 1) * (NUM_BINS / 2)).long().clamp(0, NUM_BINS - 1)
    counts = torch.zeros((*values.shape[:-1], NUM_BINS), dtype=torch.int64, device=values.device)
    counts.scatter_add_(-1, bins, counted.long())
    number = _sums_before(counts.double())
    total = _sums_before(counts * centres)
    # In units of which a bin is 2 wide, as `centres`.
    levels = torch.linspace(-NUM_BINS, NUM_BINS, 1 << bits, dtype=torch.float64).to(values.device)
    levels = levels.expand(*values.shape[:-1], -1)
    for _ in range(ITERATIONS):
        first = torch.searchsorted(centres, ((levels[..., 1:] + levels[..., :-1]) / 2).contiguous())
        first = torch.nn.functional.pad(first, (1, 0))
        first = torch.nn.functional.pad(first, (0, 1), value=NUM_BINS)
        members, sums = (before.gather(-1, first).diff(dim=-1) for before in (number, total))
        levels = torch.where(members > 0, sums / members.clamp_min(1), levels)
    return (levels / NUM_BINS).half()


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the codes of the levels [N, H, L] fp16 next to values [N, H, M] fp32, as int32
    [N, H, M]. A value in the middle has the lower code."""
    edges = ((levels[..., 1:].float() + levels[..., :-1].float()) / 2).contiguous()
    return torch.searchsorted(edges, values.contiguous(), out_int32=True)


def _sums_before(parts: torch.Tensor) -> torch.Tensor:
    """Return sums of the parts before each bin, and of all: [..., NUM_BINS + 1]."""
    return torch.nn.functional.pad(parts.cumsum(-1), (1, 0))
