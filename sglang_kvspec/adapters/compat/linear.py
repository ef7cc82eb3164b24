"""Linear layers that ranks share out, and how those without quantisation multiply."""

from __future__ import annotations

from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "UnquantizedLinearMethod"]
