"""Check of what a scorer returns."""

from __future__ import annotations

import torch

from sglang_kvspec.scorers.base import LayerChunk, Scorer


def wrong_scores(scorer: Scorer, scores: torch.Tensor, chunk: LayerChunk) -> str:
    """Return what is wrong with the scores of a chunk, a sentence; empty if they are right."""
    wanted = (chunk.keys.shape[1], chunk.end)
    if tuple(scores.shape) == wanted and not bool(scores.isnan().any()):
        return ""
    return (
        f"the scorer {type(scorer).__name__} must return {list(wanted)} scores without NaN, got "
        f"{list(scores.shape)}"
    )
