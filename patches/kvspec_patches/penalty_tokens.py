"""ScheduleBatch.cumulate_penalty_output_tokens: the worker applies penalties itself.

SGLang counts one token an iteration, which is wrong when an iteration emits none or several.
SGLang 0.5.17. Remove when speculative penalties count every emitted token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
KIND = "around"
SCOPE = "kvspec"


def hook(original: Callable[..., None], self: Any) -> None:
    if self.spec_algorithm.is_none():
        original(self)
