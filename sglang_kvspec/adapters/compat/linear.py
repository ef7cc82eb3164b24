"""Linear layers and vocabulary projections, and how those without quantisation multiply."""

from __future__ import annotations

from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
]
