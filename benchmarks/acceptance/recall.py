"""How much of a query's attention mass is on the pages that older queries choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from acceptance.drafting import TargetRun
from acceptance.rounds import DraftCaches
from kvspec_kernels.reference.page_selection import page_mass
from kvspec_kernels.reference.query_prediction import predict_query

# Queries that are averaged, and queries that a prediction starts from.
VERIFIED, WINDOW = 8, 16
# Steps between two queries that recall is measured at.
STRIDE = 12

# Returns the queries that choose, given a request's queries so far [n, heads, head_dim].
Chooser = Callable[[torch.Tensor], torch.Tensor]


def _predicted(queries: torch.Tensor) -> torch.Tensor:
    return predict_query(queries[-WINDOW:])[None]


def _ridge(queries: torch.Tensor) -> torch.Tensor:
    return predict_query(queries[-WINDOW:], softmax=False)[None]


CHOOSERS: Mapping[str, Chooser] = {
    "verified": lambda queries: queries[-VERIFIED:],
    "newest": lambda queries: queries[-1:],
    "predicted": _predicted,
    "predicted_ridge": _ridge,
}


def recalls(
    run: TargetRun, caches: DraftCaches, row: int, budget: float, ages: tuple[int, ...]
) -> dict[str, float]:
    """Return the recall of each chooser and age for one request, as `chooser.age`.

    Recall is the mass that a query has on the chosen pages, over its mass on as many best pages;
    the mean over layers, KV heads and queries. age: tokens between the newest query that the
    chooser knows and the query that reads; 1 is the query before it. Pages of the prompt count.
    """
    size = caches.page_size
    num_pages = run.prompt_len // size
    count = max(1, math.ceil(num_pages * budget))
    caches.encode(row, run.prompt_len)
    sums: dict[str, list[float]] = {}
    for before, after, (k, _) in zip(run.prompt_queries, run.queries, caches.layers, strict=True):
        queries = torch.cat((before[row], after[row]), dim=1).transpose(0, 1)
        keys = k[row, :, : num_pages * size].transpose(0, 1)
        scale = k.shape[-1] ** -0.5
        first = before.shape[2]
        for place in range(first + max(ages), len(queries), STRIDE):
            mass = page_mass(queries[place : place + 1], keys, size, scale)
            best = mass.topk(count, dim=-1).values.sum(-1)
            for name, choose in CHOOSERS.items():
                for age in ages:
                    chosen = choose(queries[: place + 1 - age])
                    pages = page_mass(chosen, keys, size, scale).topk(count, dim=-1).indices
                    recall = (mass.gather(-1, pages).sum(-1) / best).mean()
                    sums.setdefault(f"{name}.{age}", []).append(float(recall))
    return {name: sum(values) / len(values) for name, values in sums.items()}
