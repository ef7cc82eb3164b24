"""UsageProcessor.calculate_streaming_usage: adds accepted and rejected drafts to OpenAI streams.

Until SGLang 0.5.22 there are no completion_tokens_details. Since 0.5.23 they have reasoning tokens
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def hook(
    result: Any,
    prompt_tokens: Mapping[int, int],
    reasoning_tokens: Mapping[int, int],
    completion_tokens: Mapping[int, int],
    *args: Any,
    **kwargs: Any,
) -> None:
    from sglang_kvspec.adapters.usage import add_drafts

    add_drafts(result, completion_tokens.values())
