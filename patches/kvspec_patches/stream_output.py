"""SchedulerOutputStreamer.stream_output: sends nothing for a request without new tokens. With
--kvspec-stream paced, sends each token of a stream in a message of its own.

SGLang 0.5.17 decides by output length alone and would send an empty chunk every draft iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(
    original: Callable[..., Any], self: Any, reqs: list[Any], *args: Any, **kwargs: Any
) -> Any:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.streaming import stream_by_token

    if self.spec_algorithm.is_none():
        return original(self, reqs, *args, **kwargs)
    reqs = [r for r in reqs if r.finished() or len(r.output_ids) != r.send_token_offset]
    config = config_of(self.server_args)
    if config is None or config.stream == "burst":
        return original(self, reqs, *args, **kwargs)
    stream_by_token(
        lambda some: original(self, some, *args, **kwargs), reqs, self.server_args.stream_interval
    )
    return None
