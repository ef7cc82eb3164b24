"""Prediction of a request's next query from its last ones, in plain torch (AsyncSpade, section
4.2: assembled regression)."""

from __future__ import annotations

import torch

# Regularisation of the regression, relative to the mean square of a query.
RIDGE = 1e-2


def predict_query(queries: torch.Tensor, *, softmax: bool = True) -> torch.Tensor:
    """Return the query that is expected after `queries` [num_queries, num_heads, head_dim]:
    [num_heads, head_dim] fp32. With a single query, that query.

    For every window of k queries, k from 1 to num_queries - 1, the newest query is regressed from
    the k before it (ridge regression, equation 2). The weights, applied to a window one query later
    (equation 4), give an estimate, and the estimates of all windows are averaged (equation 5).
    softmax: normalise the weights as equation 3 does; without it they may be negative.
    """
    by_head = queries.float().transpose(0, 1)
    num_queries = by_head.shape[1]
    if num_queries == 1:
        return by_head[:, 0]
    newest = by_head[:, -1]
    scale = by_head.square().mean((1, 2), keepdim=True) * by_head.shape[2]
    estimates = []
    for k in range(1, num_queries):
        history = by_head[:, -1 - k : -1]
        gram = history @ history.transpose(1, 2)
        gram = gram + RIDGE * scale * torch.eye(k, device=gram.device)
        weights = torch.linalg.solve(gram, history @ newest[..., None])
        if softmax:
            weights = weights.softmax(1)
        estimates.append((weights * by_head[:, -k:]).sum(1))
    return torch.stack(estimates).mean(0)
