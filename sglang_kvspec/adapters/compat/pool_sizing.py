"""Sizing of the KV pool, for which SGLang has no interface."""

from __future__ import annotations

from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, MemoryPoolConfig

__all__ = ["DefaultPoolConfigurator", "MemoryPoolConfig"]
