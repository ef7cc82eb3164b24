"""Scorers that look at attention, compared with loops over single tokens by the papers' formulas:
snapkv, tova, h2o and kvzip."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.scorers.base import ALWAYS, LayerChunk
from sglang_kvspec.scorers.h2o import H2O
from sglang_kvspec.scorers.kvzip import KVzip
from sglang_kvspec.scorers.snapkv import SnapKV
from sglang_kvspec.scorers.tova import TOVA

groups = pytest.mark.parametrize("group", [1, 3])


def assert_scores(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def snapkv_by_loops(layer, num_observed, kernel):
    """Return the scores of all tokens but the last num_observed, whose queries count."""
    num_scored = layer.num_tokens - num_observed
    scores = torch.full((layer.keys.shape[1], layer.num_tokens), ALWAYS, dtype=torch.float64)
    for kv_head in range(len(scores)):
        heads = range(kv_head * layer.group, (kv_head + 1) * layer.group)
        observed = [
            layer.attention(token, head).tolist()
            for token in range(num_scored, layer.num_tokens)
            for head in heads
        ]
        mass = [sum(row[token] for row in observed) / len(observed) for token in range(num_scored)]
        for token in range(num_scored):
            near = range(token - kernel // 2, token + kernel // 2 + 1)
            scores[kv_head, token] = sum(mass[at] for at in near if 0 <= at < num_scored) / kernel
    return scores


@groups
@pytest.mark.parametrize("ends", [[20], [10, 20], [17, 20], [18, 19, 20]])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_snapkv_is_the_pooled_mean_over_the_window(make_layer, group, ends, kernel):
    layer = make_layer(20, group=group)
    found = layer.run(SnapKV(window=4, kernel=kernel), ends)
    assert_scores(found, snapkv_by_loops(layer, 4, kernel))


def test_snapkv_reads_a_prompt_that_is_no_longer_than_its_window(make_layer):
    for ends in [[8], [3, 8]]:
        assert (make_layer(8).run(SnapKV(window=8), ends) == ALWAYS).all()
    assert (make_layer(9).run(SnapKV(window=8)) != ALWAYS).sum(-1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("ends", [[20], [18, 20]])
def test_snapkv_scores_a_cached_prefix_by_the_queries_that_there_are(make_layer, ends):
    layer = make_layer(20)
    found = layer.run(SnapKV(window=8), ends, cached=17)
    assert_scores(found, snapkv_by_loops(layer, 3, 5))


def test_snapkv_holds_no_more_queries_than_its_window(make_layer):
    memory = {}
    layer = make_layer(20)
    for start, end in [(0, 15), (15, 20)]:
        tensors = (layer.queries[start:end], 1.0, layer.keys[:end], layer.values[:end])
        scores = torch.full((3, start), ALWAYS)
        SnapKV(window=4).score(LayerChunk(0, 0, start, end, *tensors, scores, memory))
        assert torch.equal(memory["queries"], layer.queries[end - 4 : end])
        assert memory["queries"].untyped_storage().nbytes() == layer.queries[-4:].nbytes


@groups
@pytest.mark.parametrize("cached", [0, 5])
def test_tova_is_the_attention_of_the_newest_query(make_layer, group, cached):
    layer = make_layer(12, group=group)
    num_heads = layer.queries.shape[1]
    mean = sum(layer.attention(11, head) for head in range(num_heads)) / num_heads
    assert_scores(layer.run(TOVA(), [7, 12], cached=cached), mean.repeat(3, 1))


def test_tova_scores_verified_tokens(make_layer):
    layer = make_layer(12)
    found = layer.run(TOVA(), [7, 10, 12], prompt_len=7)
    assert torch.equal(found, layer.run(TOVA()))


def test_tova_takes_the_mean_over_the_heads_of_a_rank(make_layer):
    rank = make_layer(12).of_heads(1, 3)
    mean = sum(rank.attention(11, head) for head in range(4)) / 4
    assert_scores(rank.run(TOVA(), first_kv_head=1), mean.repeat(2, 1))


def h2o_by_loops(layer, cached):
    scores = torch.zeros(layer.keys.shape[1], layer.num_tokens, dtype=torch.float64)
    for token in range(cached, layer.num_tokens):
        for head in range(layer.queries.shape[1]):
            scores[head // layer.group, : token + 1] += layer.attention(token, head) / layer.group
    scores[:, :cached] = ALWAYS
    return scores


@groups
@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("ends", [[14], [6, 7, 14]])
def test_h2o_adds_up_the_attention_of_all_queries(make_layer, group, cached, ends):
    layer = make_layer(14, group=group)
    assert_scores(layer.run(H2O(), ends, cached=cached), h2o_by_loops(layer, cached))


def test_h2o_goes_on_with_verified_tokens(make_layer):
    layer = make_layer(14)
    assert_scores(layer.run(H2O(), [9, 12, 14], prompt_len=9), h2o_by_loops(layer, 0))


def kvzip_by_loops(layer, prompt_len):
    scores = torch.zeros(layer.keys.shape[1], prompt_len, dtype=torch.float64)
    for token in range(prompt_len, layer.num_tokens):
        for head in range(layer.queries.shape[1]):
            best = scores[head // layer.group]
            best.copy_(torch.maximum(best, layer.attention(token, head)[:prompt_len]))
    return scores


@groups
@pytest.mark.parametrize("ends", [[10, 22], [4, 10, 15, 22]])
@pytest.mark.parametrize("cached", [0, 3])
def test_kvzip_is_the_largest_attention_of_repeats(make_layer, group, ends, cached):
    layer = make_layer(22, group=group)
    found = layer.run(KVzip(), ends, cached=cached, prompt_len=10)
    assert_scores(found[:, :10], kvzip_by_loops(layer, 10))


def test_kvzip_reads_all_tokens_until_a_repeat(make_layer):
    assert (make_layer(10).run(KVzip(), [4, 10]) == ALWAYS).all()


def test_kvzip_keeps_the_larger_of_two_repeats_in_the_same_place(make_layer):
    # Parts of a long prompt are repeated one by one, each right behind the prompt.
    first, second = make_layer(16), make_layer(17)
    second.keys[:10], second.values[:10] = first.keys[:10], first.values[:10]
    scores, memory = torch.full((3, 10), ALWAYS), {}
    for layer in (first, second):
        parts = (layer.queries[10:], layer.scale, layer.keys, layer.values, scores[:, :10], memory)
        scores = KVzip().score(LayerChunk(0, 0, 10, 10, *parts))
    expected = torch.maximum(kvzip_by_loops(first, 10), kvzip_by_loops(second, 10))
    assert_scores(scores[:, :10], expected)
