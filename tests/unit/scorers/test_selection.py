"""Tokens that drafts read, compared with a loop over units."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.scorers.base import ALWAYS
from sglang_kvspec.scorers.selection import kept_tokens

# Whole numbers, so that sums have no rounding; few, so that many are equal.
values = st.integers(-3, 3).map(float) | st.sampled_from([ALWAYS, -math.inf])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Draw scores of a few layers, heads and units, and tokens of a unit."""
    layers, heads, units, unit = (draw(st.integers(1, most)) for most in (3, 3, 6, 3))
    count = layers * heads * units * unit
    numbers = draw(st.lists(values, min_size=count, max_size=count))
    return torch.tensor(numbers).view(layers, heads, units * unit), unit


def kept_by_loops(scores, budget, allocation, unit):
    num_layers, num_heads, num_tokens = scores.shape
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    competing: dict[tuple[int, ...], list] = {}
    for layer in range(num_layers):
        for head in range(num_heads):
            rivals = {"head": (layer, head), "layer": (layer,), "model": ()}[allocation]
            for first in range(0, num_tokens, unit):
                members = scores[layer, head, first : first + unit].tolist()
                place = (layer, head, first)
                if ALWAYS in members:
                    kept[layer, head, first : first + unit] = True
                    members = None
                competing.setdefault(rivals, []).append((members, place))
    for units in competing.values():
        heads = len({place[:2] for _, place in units})
        count = heads * math.ceil(budget * (num_tokens // unit))
        others = [(-sum(members), place) for members, place in units if members is not None]
        for _, (layer, head, first) in sorted(others)[:count]:
            kept[layer, head, first : first + unit] = True
    return kept


def kept_together_by_loops(scores, budget, unit):
    num_tokens = scores.shape[-1]
    kept, worth = torch.zeros(scores.shape, dtype=torch.bool), []
    for first in range(0, num_tokens, unit):
        members = scores[..., first : first + unit]
        if ALWAYS in members:
            kept[..., first : first + unit] = True
        else:
            worth.append((-float(members.sum()), first))
    for _, first in sorted(worth)[: math.ceil(budget * (num_tokens // unit))]:
        kept[..., first : first + unit] = True
    return kept


@pytest.mark.parametrize("allocation", ["head", "layer", "model"])
@given(case=cases(), budget=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]))
def test_the_best_units_of_those_that_compete_are_read(allocation, case, budget):
    scores, unit = case
    found = kept_tokens(scores, budget, allocation, unit)
    assert torch.equal(found, kept_by_loops(scores, budget, allocation, unit))


@given(case=cases(), budget=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]))
def test_all_heads_read_the_same_units_if_asked(case, budget):
    scores, unit = case
    found = kept_tokens(scores, budget, "same", unit)
    assert torch.equal(found, kept_together_by_loops(scores, budget, unit))
