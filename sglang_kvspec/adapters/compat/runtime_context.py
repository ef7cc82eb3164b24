"""Settings that SGLang publishes once for each process."""

from __future__ import annotations

from sglang.srt.runtime_context import get_parallel, get_schedule

__all__ = ["get_parallel", "get_schedule"]
