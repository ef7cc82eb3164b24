"""Attention in blocks, compared with one query at a time."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.scorers import attention
from sglang_kvspec.scorers.attention import attention_blocks, attention_mass


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_queries", [1, 2, 7])
@pytest.mark.parametrize("elements", [1, 100, 2**20])
def test_blocks_are_the_attention_of_each_query(
    make_layer, monkeypatch, group, num_queries, elements
):
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", elements)
    layer = make_layer(7, num_kv_heads=2, group=group)
    first = 7 - num_queries
    blocks = list(attention_blocks(layer.queries[first:], layer.keys, layer.scale))
    largest = max(1, elements // (2 * group * 7))
    assert sum(block.shape[2] for block in blocks) == num_queries
    assert max(block.shape[2] for block in blocks) == min(largest, num_queries)
    token = first
    for block in blocks:
        token += block.shape[2]
        assert block.shape[-1] == token
        for row in range(block.shape[2]):
            own = token - block.shape[2] + row
            for head in range(2 * group):
                found = block[head // group, head % group, row]
                torch.testing.assert_close(
                    found[: own + 1].double(), layer.attention(own, head), rtol=0, atol=1e-6
                )
                assert (found[own + 1 :] == 0).all()


@pytest.mark.parametrize("elements", [1, 100, 2**20])
def test_mass_is_the_sum_over_queries_and_the_mean_over_heads(make_layer, monkeypatch, elements):
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", elements)
    layer = make_layer(9, num_kv_heads=2, group=2)
    mass = torch.zeros(2, 9, dtype=torch.float64)
    for token in range(4, 9):
        for head in range(4):
            mass[head // 2, : token + 1] += layer.attention(token, head) / 2
    found = attention_mass(layer.queries[4:], layer.keys, layer.scale)
    torch.testing.assert_close(found.double(), mass, rtol=0, atol=1e-6)
