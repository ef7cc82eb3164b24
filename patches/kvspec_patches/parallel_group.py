"""init_model_parallel_group: ranks on a CPU communicate through gloo only.

SGLang 0.5.17 also sets up NCCL, which is part of torch's CUDA build and raises on a CPU. It also
sets up an all-reduce between GPUs, which only warns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **(kwargs | {"use_pynccl": False, "use_custom_allreduce": False}))
