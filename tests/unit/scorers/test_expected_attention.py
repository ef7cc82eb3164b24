"""Expected Attention, compared with the paper's formula query by query."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.scorers import expected_attention
from sglang_kvspec.scorers.base import ALWAYS
from sglang_kvspec.scorers.expected_attention import ExpectedAttention


def by_loops(layer, scorer, cached=0):
    """Return the scores in float64. The average of rotations is taken over rotated queries, one
    position after another, so that no matrix of it is needed."""
    end, sinks = layer.num_tokens, scorer.sinks
    first = max(cached, sinks)
    positions = torch.arange(first, end)
    queries = layer.rotary.unrotate(layer.queries[first:].double(), positions)
    mean = queries.mean(0)
    rotated_mean = averaged(layer, mean[None], end, scorer.future)[0]
    rotated = averaged(layer, queries - mean, end, scorer.future)
    scores = torch.full((layer.keys.shape[1], end), ALWAYS, dtype=torch.float64)
    for kv_head in range(len(scores)):
        shares = []
        for head in range(kv_head * layer.group, (kv_head + 1) * layer.group):
            terms = []
            for key in layer.keys[sinks:, kv_head].double():
                variance = ((rotated[:, head] @ key) ** 2).mean()
                logit = layer.scale * rotated_mean[head] @ key + layer.scale**2 * variance / 2
                terms.append(torch.exp(logit))
            shares.append(torch.stack(terms) / sum(terms))
        norms = torch.stack([value.double().norm() for value in layer.values[sinks:, kv_head]])
        scores[kv_head, sinks:] = sum(shares) / len(shares) * norms
    return scores


def averaged(layer, queries, first, num):
    """Return the mean of each query [n, num_heads, head_dim] at the num positions from first on."""
    places = range(first, first + num)
    return sum(
        layer.rotary.rotate(queries, torch.full((len(queries),), place)) for place in places
    ) / len(places)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("options", [{}, {"future": 1, "sinks": 0}, {"future": 3, "sinks": 2}])
@pytest.mark.parametrize("ends", [[14], [3, 7, 14], [13, 14]])
def test_scores_are_those_of_the_formula(make_layer, group, options, ends):
    layer = make_layer(14, num_kv_heads=2, group=group)
    scorer = ExpectedAttention(**{"future": 20, **options})
    found = layer.run(scorer, ends)
    torch.testing.assert_close(found.double(), by_loops(layer, scorer), rtol=0, atol=1e-5)


@pytest.mark.parametrize("cached", [2, 4, 9, 13])
def test_a_cached_prefix_is_scored_by_the_queries_behind_it(make_layer, cached):
    layer = make_layer(14, num_kv_heads=2)
    scorer = ExpectedAttention(future=20)
    found = layer.run(scorer, cached=cached)
    torch.testing.assert_close(found.double(), by_loops(layer, scorer, cached), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_sinks_alone_are_read(make_layer, num_tokens):
    assert (make_layer(num_tokens).run(ExpectedAttention()) == ALWAYS).all()


def test_keys_in_blocks_have_the_same_scores(make_layer, monkeypatch):
    layer = make_layer(50)
    whole = layer.run(ExpectedAttention())
    # Blocks of 3 keys.
    monkeypatch.setattr(expected_attention, "BLOCK_ELEMENTS", 3 * layer.queries[0].numel())
    torch.testing.assert_close(layer.run(ExpectedAttention()), whole)


def test_a_mean_far_from_zero_keeps_its_digits(make_layer):
    # The difference of sums of squares would lose the covariance here.
    layer = make_layer(300, num_kv_heads=1)
    positions = torch.arange(300)
    layer.queries = layer.rotary.rotate(layer.queries.double() + 300, positions).float()
    layer.keys *= 0.01
    scorer = ExpectedAttention(future=2)
    found = layer.run(scorer, [100, 200, 300])
    torch.testing.assert_close(found.double(), by_loops(layer, scorer), rtol=1e-3, atol=1e-6)
