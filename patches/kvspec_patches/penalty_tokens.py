"""ScheduleBatch.cumulate_penalty_output_tokens: the worker applies penalties itself.

SGLang counts one token an iteration, which is wrong when an iteration emits none or several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., None], self: Any) -> None:
    if self.spec_algorithm.is_none():
        original(self)
