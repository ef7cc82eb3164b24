"""UsageProcessor.calculate_response_usage: adds accepted and rejected drafts to OpenAI answers.

Until SGLang 0.5.22 there are no completion_tokens_details. Since 0.5.23 they have reasoning tokens
only.
"""

from __future__ import annotations

from typing import Any


def hook(result: Any, responses: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
    from sglang_kvspec.adapters.usage import add_drafts

    add_drafts(result, (each["meta_info"].get("completion_tokens", 0) for each in responses))
