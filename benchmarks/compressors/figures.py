"""Figures of every method of a run, from its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from acceptance.model import LlamaShape
from acceptance.report import Estimate, Figure
from acceptance.rounds import Rounds

from compressors.costs import (
    accepted_curve,
    bytes_per_token,
    expected_tokens_per_s,
    plain_tokens_per_s,
    residency,
)
from compressors.methods import Anchors, anchors_of
from compressors.names import ALL_TOKENS, DENSE4_LABEL, PLAIN, Method

# Rounds of several requests by method.
Results = Mapping[Method, list[Rounds]]
DENSE4_METHOD = Method(ALL_TOKENS, DENSE4_LABEL, 1.0)


def figures_of(
    results: Results,
    anchors: Mapping[str, Anchors],
    rescored: frozenset[str],
    shape: LlamaShape,
    draft_len: int,
) -> list[Figure]:
    """Return the figures of a run, DENSE4_METHOD's among them. anchors: by label. rescored: labels
    of scorers that score anew after each verification."""
    figures = []
    rates = {method: _rate(method, results, anchors, rescored, draft_len) for method in results}
    plain_bytes = anchors_of(PLAIN, shape.head_dim).page_bytes(shape.head_dim)
    dense4_bytes = anchors[DENSE4_LABEL].page_bytes(shape.head_dim)
    dense4 = accepted_of(results[DENSE4_METHOD])
    for method, rounds in results.items():
        accepted, share = accepted_of(rounds), share_of(rounds)
        dense = accepted_of(results[Method(ALL_TOKENS, method.anchors, 1.0)]).mean
        page_bytes = anchors[method.anchors].page_bytes(shape.head_dim)
        heads = shape.num_layers * shape.num_kv_heads
        token_bytes = bytes_per_token(anchors[method.anchors], share.mean, heads, shape.head_dim)
        fits = residency(page_bytes, plain_bytes, share.mean)
        for what, value, unit, spread, baseline in (
            ("accepted", accepted.mean, "tokens", accepted.half_width, dense),
            ("vs_dense", accepted.mean / dense, "x", None, 1.0),
            ("vs_dense4", accepted.mean / dense4.mean, "x", None, 1.0),
            ("read", share.mean, "share", share.half_width, None),
            ("bytes_per_token", token_bytes, "bytes", None, None),
            ("bytes_vs_dense4", share.mean * page_bytes / dense4_bytes, "x", None, 1.0),
            ("tokens_vs_plain", fits.resident, "x", None, 1.0),
            ("tokens_vs_plain.hosted", fits.hosted, "x", None, 1.0),
            ("tokens_vs_plain.freed", fits.freed, "x", None, 1.0),
            ("tokens_per_s", rates[method], "tokens/s", None, rates[DENSE4_METHOD]),
        ):
            name = f"compressors.{method.name}.{what}"
            figures.append(Figure(name, value, unit, spread, baseline))
    figures.append(Figure("compressors.plain_tokens_per_s", plain_tokens_per_s(), "tokens/s"))
    return figures


def raw_of(results: Results) -> dict[str, list[dict[str, list]]]:
    """Return accept lengths and shares read of every round, by method and request."""
    kept = ("accepted", "tokens_read")
    return {
        method.name: [{what: asdict(each)[what] for what in kept} for each in rounds]
        for method, rounds in results.items()
    }


def accepted_of(rounds: Sequence[Rounds]) -> Estimate:
    """Return the mean accept length, by request first: requests with many rounds count once."""
    return Estimate.of(torch.tensor([_mean(each.accepted) for each in rounds]))


def share_of(rounds: Sequence[Rounds]) -> Estimate:
    """Return the mean share of the context that drafts read, by request first."""
    return Estimate.of(torch.tensor([_mean(each.tokens_read) for each in rounds]))


def _rate(
    method: Method,
    results: Results,
    anchors: Mapping[str, Anchors],
    rescored: frozenset[str],
    draft_len: int,
) -> float:
    rounds = results[method]
    accepted = [length for each in rounds for length in each.accepted]
    return expected_tokens_per_s(
        anchors[method.anchors],
        share_of(rounds).mean,
        accepted_curve(accepted, draft_len),
        rescored=method.scorer in rescored,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
