"""Softmax attention of a chunk's queries, computed in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Elements of the largest tensor of a block: 256 MiB in float32.
BLOCK_ELEMENTS = 2**26


def attention_blocks(
    queries: torch.Tensor, keys: torch.Tensor, scale: float
) -> Iterator[torch.Tensor]:
    """Yield the attention probabilities of consecutive blocks of queries, float32 [num_kv_heads,
    query heads of one KV head, queries of the block, keys that the block's last query sees].

    queries: [n, num_heads, head_dim], those of the last n tokens that have keys, at most num_keys.
    keys: [num_keys, num_kv_heads, head_dim]. A query sees the keys up to its own token. A block has
    as many queries as BLOCK_ELEMENTS allows, at least one.
    """
    num_queries, num_heads, head_dim = queries.shape
    num_keys, num_kv_heads, _ = keys.shape
    first = num_keys - num_queries
    keys = keys.float().permute(1, 2, 0)  # [num_kv_heads, head_dim, num_keys]
    by_head = queries.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    positions = torch.arange(num_keys, device=keys.device)
    size = max(1, BLOCK_ELEMENTS // (num_heads * num_keys))
    for begin in range(0, num_queries, size):
        block = by_head[:, :, begin : begin + size]
        own = positions[first + begin : first + begin + size]
        visible = first + begin + len(own)
        # Query heads stand beside queries, so that no copy of the keys is made for each of them.
        products = (block.flatten(1, 2) @ keys[:, :, :visible]).mul_(scale)
        logits = products.view(*block.shape[:3], visible)
        logits.masked_fill_(positions[:visible] > own[:, None], -torch.inf)
        yield logits.softmax(-1)


def attention_mass(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention that each key receives, [num_kv_heads, num_keys] float32: its sum over
    the queries, and its mean over the query heads of the KV head. Arguments are those of
    attention_blocks()."""
    mass = keys.new_zeros((keys.shape[1], keys.shape[0]), dtype=torch.float32)
    for block in attention_blocks(queries, keys, scale):
        mass[:, : block.shape[-1]] += block.mean(1).sum(1)
    return mass
