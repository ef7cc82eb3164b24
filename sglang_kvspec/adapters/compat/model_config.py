"""Model configurations, which KVSpec reads before SGLang resolves its arguments."""

from __future__ import annotations

from sglang.srt.configs.model_config import AttentionArch, ModelConfig

__all__ = ["AttentionArch", "ModelConfig"]
