"""Verdicts and reserves of the prefill scheduler, which KVSpec makes stricter."""

from __future__ import annotations

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

__all__ = ["AddReqResult", "get_alloc_reserve_per_decode"]
