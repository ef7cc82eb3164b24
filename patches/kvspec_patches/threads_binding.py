"""numa_utils.init_threads_binding: ranks of a server may share a NUMA node.

SGLang 0.5.17 needs a NUMA node for each rank, for kernels that the reference platform does not
have. Plain torch is not bound to cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], *, tp_rank: int, tp_size: int) -> Any:
    return original(tp_rank=tp_rank, tp_size=tp_size) if tp_size == 1 else None
