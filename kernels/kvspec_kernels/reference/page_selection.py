"""Selection of the pages that drafts read, in plain torch: the specification of the kernels.

Queries of a request's last verified tokens attend to its past pages. A page's mass is the share of
their attention that is on it. The pages with the largest mass are read, and some that are read
always (AsyncSpade, section 3, by pages instead of tokens).
"""

from __future__ import annotations

import torch


def page_mass(q: torch.Tensor, k: torch.Tensor, page_size: int, scale: float) -> torch.Tensor:
    """Return the attention mass [num_kv_heads, num_pages] fp32 of the pages of k [num_pages *
    page_size, num_kv_heads, head_dim]. The mass of a KV head adds up to 1.

    q: [num_queries, num_qo_heads, head_dim]; every query attends to all pages. A page's mass is the
    mean over the queries of all heads of a KV head's group.
    """
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1]).float()
    scores = torch.einsum("nhgd,thd->hngt", grouped, k.float()) * scale
    by_token = scores.softmax(-1).mean((1, 2))
    return by_token.view(k.shape[1], -1, page_size).sum(-1)


def updated_mass(
    known: torch.Tensor | None, new: torch.Tensor, num_queries: int, most_queries: int
) -> torch.Tensor:
    """Return the mass [..., num_pages] of about the last most_queries queries.

    known: mass of the first pages by earlier queries, None without any. new: mass of all pages by
    the newest num_queries queries, which replace as large a share of `known`.
    """
    if known is None:
        return new
    count = known.shape[-1]
    kept = known + min(num_queries / most_queries, 1) * (new[..., :count] - known)
    return torch.cat((kept, new[..., count:]), dim=-1)


def select_pages(mass: torch.Tensor, count: int, num_first: int, num_last: int) -> torch.Tensor:
    """Return the indices of `count` pages, ascending, by the mass [..., num_pages]: [..., count]
    int64.

    The first num_first and the last num_last pages are always among them; count is at least as
    many. Of pages with equal mass, those with the lower index are chosen.
    """
    num_pages = mass.shape[-1]
    ranked = mass.clone()
    ranked[..., :num_first] = torch.inf
    ranked[..., num_pages - num_last :] = torch.inf
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values
