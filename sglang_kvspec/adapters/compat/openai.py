"""Models of OpenAI answers, to which KVSpec adds counts of drafts. SGLang has details of completion
tokens since 0.5.23."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.openai import protocol

__all__ = ["details_model", "protocol"]


def _has_details() -> bool:
    return hasattr(protocol, "CompletionTokensDetails")


if _has_details():

    def details_model() -> Any:
        """Return SGLang's model of the details of completion tokens, or one without fields."""
        return protocol.CompletionTokensDetails

else:

    def details_model() -> Any:
        """Return SGLang's model of the details of completion tokens, or one without fields."""
        return protocol.BaseModel
