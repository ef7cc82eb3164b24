"""Test for models with recurrent state, which KVSpec refuses."""

from __future__ import annotations

from sglang.srt.configs.hybrid_arch import mambaish_config

__all__ = ["mambaish_config"]
