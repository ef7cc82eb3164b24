"""Registry of speculative algorithms and the base classes of an algorithm."""

from __future__ import annotations

from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

__all__ = ["CustomSpecAlgo", "SpecInput", "SpecInputType", "SpeculativeAlgorithm"]
