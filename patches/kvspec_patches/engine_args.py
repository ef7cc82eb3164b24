"""Engine.server_args_class: accepts kvspec keyword arguments, which ServerArgs does not declare,
and switches KVSpec on or off for the child processes of this process.

An engine loads plug-ins when it is made, and then builds its ServerArgs by this attribute. From
SGLang 0.5.20 on, ServerArgs is a msgspec structure, which never calls a hook of its __init__.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_kvspec.adapters.server_args import build_server_args


def hook(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    return build_server_args(original, kwargs)
