"""The reason for which SGLang ends a request that is at fault."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import FINISH_ABORT

__all__ = ["FINISH_ABORT"]
