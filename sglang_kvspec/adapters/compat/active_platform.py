"""The platform that SGLang chose; importing this module makes SGLang choose."""

from __future__ import annotations

from sglang.srt.platforms import current_platform

__all__ = ["current_platform"]
