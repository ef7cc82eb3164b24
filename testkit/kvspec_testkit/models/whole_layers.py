"""Linear layers of SGLang outside a server, which are not divided among ranks."""

from __future__ import annotations

from inspect import signature
from typing import Any

from sglang.srt.layers.linear import ColumnParallelLinear


def whole_layer_options() -> dict[str, Any]:
    """Return arguments of column and row parallel layers with which these are whole. Layers of
    SGLang 0.5.23 take the name of a group of ranks, earlier ones a rank and a number of ranks."""
    if "tp_rank" in signature(ColumnParallelLinear).parameters:
        return {"tp_rank": 0, "tp_size": 1}
    return {"parallel_group": "replicated"}
