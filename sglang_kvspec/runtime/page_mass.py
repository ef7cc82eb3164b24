"""Attention mass of pages: what share of what a request's newest queries read is on each page."""

from __future__ import annotations

import torch


def page_mass(q: torch.Tensor, k: torch.Tensor, num_pages: int, page_size: int) -> torch.Tensor:
    """Return the attention mass [num_kv_heads, num_pages] float32 of the first num_pages pages.

    q: [num_queries, num_heads, head_dim], scaled, of the last tokens of k [num_tokens,
    num_kv_heads, head_dim]. Each query attends to all tokens up to its own. The mass of a KV head
    is the mean over its queries. With the tokens behind these pages, it adds up to 1.
    """
    num_queries, num_tokens = len(q), len(k)
    grouped = q.unflatten(1, (k.shape[1], -1)).float()
    scores = torch.einsum("nhgd,thd->hngt", grouped, k.float())
    own = torch.arange(num_tokens - num_queries, num_tokens, device=k.device)
    hidden = torch.arange(num_tokens, device=k.device) > own[:, None]
    scores.masked_fill_(hidden[:, None], -torch.inf)
    by_token = scores.softmax(-1).mean((1, 2))
    return by_token[:, : num_pages * page_size].unflatten(1, (num_pages, page_size)).sum(-1)
