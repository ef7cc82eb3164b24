"""The base class of speculative workers."""

from __future__ import annotations

from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

__all__ = ["BaseSpecWorker"]
