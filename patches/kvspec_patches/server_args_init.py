"""ServerArgs.__init__: accepts kvspec keyword arguments (sglang.Engine passes its own on) and
switches KVSpec on or off for the child processes of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_kvspec.adapters.server_args import build_server_args


def hook(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    build_server_args(original, self, args, kwargs)
