"""Attention backends: SGLang registers them by name and lets a plugin add one."""

from __future__ import annotations

from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionType",
    "LogitsProcessor",
    "RadixAttention",
    "register_attention_backend",
]
