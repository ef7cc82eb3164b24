"""Conformance tests of every scorer, of this project or of another package: results depend neither
on chunks nor on ranks. `Layer.run` checks shapes, dtypes and unchanged inputs of each chunk."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_kvspec.core.seams import SCORERS
from sglang_kvspec.scorers.base import ALWAYS

# A press of kvpress decides what `kvpress` does. test_press.py tests it.
NAMES = [name for name in SCORERS.names() if name != "kvpress"]
every_scorer = pytest.mark.parametrize("name", NAMES)
# More tokens than any window has.
TOKENS = 90


@every_scorer
def test_a_scorer_is_a_frozen_dataclass_of_options(make_scorer, name):
    scorer = make_scorer(name)
    for option in dataclasses.fields(scorer):
        assert option.default is not dataclasses.MISSING
        assert type(option.default) in (int, float, str)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(scorer, option.name, option.default)
    assert all(scorer.about)
    assert scorer.allocation in ("head", "layer", "model")


@every_scorer
@pytest.mark.parametrize("ends", [[30, 60, 90], [1, 2, 90], [70, 89, 90], [86, 88, 90]])
def test_three_chunks_give_the_scores_of_one(make_scorer, make_layer, name, ends):
    layer, scorer = make_layer(TOKENS), make_scorer(name)
    torch.testing.assert_close(layer.run(scorer, ends), layer.run(scorer))


@every_scorer
def test_single_tokens_give_the_scores_of_one_chunk(make_scorer, make_layer, name):
    layer, scorer = make_layer(40), make_scorer(name)
    torch.testing.assert_close(layer.run(scorer, [*range(1, 41)]), layer.run(scorer))


@every_scorer
def test_repeats_in_chunks_give_the_scores_of_one(make_scorer, make_layer, name):
    layer, scorer = make_layer(TOKENS), make_scorer(name)
    cut = layer.run(scorer, [20, 45, 60, 75, 90], prompt_len=45)
    torch.testing.assert_close(cut, layer.run(scorer, [45, 90], prompt_len=45))


@every_scorer
@pytest.mark.parametrize("cached", [1, 3, 50, 89])
def test_chunks_do_not_matter_behind_a_cached_prefix(make_scorer, make_layer, name, cached):
    layer, scorer = make_layer(TOKENS), make_scorer(name)
    ends = sorted({cached + 1, (cached + TOKENS) // 2 + 1, TOKENS})
    cut = layer.run(scorer, [end for end in ends if end <= TOKENS], cached=cached)
    torch.testing.assert_close(cut, layer.run(scorer, cached=cached))


@every_scorer
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 31, 32, 33])
def test_short_prompts_have_scores(make_scorer, make_layer, name, num_tokens):
    make_layer(num_tokens).run(make_scorer(name))


@every_scorer
def test_ranks_agree_with_one_rank(make_scorer, make_layer, name):
    if name == "tova":
        pytest.skip("tova takes the mean over the query heads of a rank")
    layer, scorer = make_layer(TOKENS), make_scorer(name)
    parts = [
        layer.of_heads(first, stop).run(scorer, first_kv_head=first, layer=1)
        for first, stop in [(0, 1), (1, 3)]
    ]
    torch.testing.assert_close(torch.cat(parts), layer.run(scorer, layer=1))


@every_scorer
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (3, 1), (2, 4)])
def test_equal_query_heads_of_a_kv_head_count_as_one(
    make_scorer, make_layer, name, num_kv_heads, group
):
    alone = make_layer(TOKENS, num_kv_heads=num_kv_heads, group=1)
    grouped = dataclasses.replace(alone, queries=alone.queries.repeat_interleave(group, dim=1))
    scorer = make_scorer(name)
    torch.testing.assert_close(grouped.run(scorer), alone.run(scorer))


@every_scorer
def test_bf16_is_scored_in_float32(make_scorer, make_layer, name):
    short = make_layer(TOKENS, dtype=torch.bfloat16)
    tensors = {key: getattr(short, key).float() for key in ("queries", "keys", "values", "hidden")}
    scorer = make_scorer(name)
    same = dataclasses.replace(short, **tensors)
    torch.testing.assert_close(short.run(scorer), same.run(scorer))


@every_scorer
@pytest.mark.parametrize("factor", [0, 1, 100])
def test_tokens_have_a_finite_score_or_are_always_read(make_scorer, make_layer, name, factor):
    layer = make_layer(TOKENS)
    parts = [factor * part for part in (layer.queries, layer.keys, layer.values, layer.hidden)]
    scores = type(layer)(*parts, rotary=layer.rotary).run(make_scorer(name), [40, 90])
    assert ((scores == ALWAYS) | scores.isfinite()).all()


@every_scorer
def test_scores_are_repeatable(make_scorer, make_layer, name):
    layer, scorer = make_layer(TOKENS), make_scorer(name)
    assert torch.equal(layer.run(scorer, [50, 90]), layer.run(scorer, [50, 90]))
