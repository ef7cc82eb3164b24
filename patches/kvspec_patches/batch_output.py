"""TokenizerManager._handle_batch_output: paces the tokens of a round (--kvspec-stream paced).

SGLang 0.5.17 passes on output as it arrives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any


def hook(original: Callable[..., Awaitable[None]], self: Any, output: Any) -> Awaitable[None]:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.streaming import PacedOutputs

    config = config_of(self.server_args)
    if config is None or config.stream == "burst":
        return original(self, output)
    return PacedOutputs.of(self, partial(original, self)).receive(output)
