"""Check of what a scorer returns."""

from __future__ import annotations

import torch

from sglang_kvspec.scorers.base import LayerChunk, Scorer


def wrong_scores(scorer: Scorer, scores: torch.Tensor, chunk: LayerChunk) -> str:
    """Return what is wrong with the scores of a chunk, a sentence; empty if they are right."""
    wanted, device = (chunk.keys.shape[1], chunk.end), chunk.keys.device
    is_right = tuple(scores.shape) == wanted and scores.device == device
    if is_right and not bool(scores.isnan().any()):
        return ""
    return (
        f"the scorer {type(scorer).__name__} must return {list(wanted)} scores on {device} without "
        f"NaN, got {list(scores.shape)} on {scores.device}"
    )
