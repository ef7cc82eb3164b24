"""UsageProcessor.calculate_response_usage: accepted and rejected drafts of whole OpenAI answers.

SGLang 0.5.17 has no completion_tokens_details. Remove when its UsageInfo has them.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.entrypoints.openai.usage_processor.UsageProcessor.calculate_response_usage"
KIND = "after"
SCOPE = "front_kvspec"


def hook(result: Any, responses: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
    from sglang_kvspec.adapters.usage import add_drafts

    add_drafts(result, (each["meta_info"].get("completion_tokens", 0) for each in responses))
