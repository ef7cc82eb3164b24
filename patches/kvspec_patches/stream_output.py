"""SchedulerOutputStreamer.stream_output: sends nothing for a request that emitted nothing.

SGLang 0.5.17 decides by output length alone and would send an empty chunk every draft iteration.
Remove when it skips requests without new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)
KIND = "around"
SCOPE = "kvspec"


def hook(
    original: Callable[..., Any], self: Any, reqs: list[Any], *args: Any, **kwargs: Any
) -> Any:
    if not self.spec_algorithm.is_none():
        reqs = [r for r in reqs if r.finished() or len(r.output_ids) != r.send_token_offset]
    return original(self, reqs, *args, **kwargs)
