"""Models of OpenAI answers, to which KVSpec adds counts of drafts."""

from __future__ import annotations

from sglang.srt.entrypoints.openai import protocol

__all__ = ["protocol"]
