"""Linear layers of models, and how those without quantisation multiply."""

from __future__ import annotations

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

__all__ = ["LinearBase", "UnquantizedLinearMethod"]
