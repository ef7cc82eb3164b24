"""get_masked_input_and_mask: runs without compilation on a CPU.

With several ranks, SGLang 0.5.17 compiles this handful of operations at the first request. On a CPU
that takes 20 seconds and a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.compiler.set_stance("force_eager"):
        return original(*args, **kwargs)
