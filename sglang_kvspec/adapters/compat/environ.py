"""Environment variables of SGLang that KVSpec must honour."""

from __future__ import annotations

from sglang.srt.environ import envs

__all__ = ["envs"]
