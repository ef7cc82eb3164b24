"""Models of OpenAI answers, to which KVSpec adds counts of drafts."""

from __future__ import annotations

from sglang.srt.entrypoints.openai import protocol

try:
    from sglang.srt.entrypoints.openai.protocol import CompletionTokensDetails
except ImportError:
    # Until 0.5.22 SGLang has no details: the base class of its models has no fields.
    from sglang.srt.entrypoints.openai.protocol import BaseModel as CompletionTokensDetails

__all__ = ["CompletionTokensDetails", "protocol"]
