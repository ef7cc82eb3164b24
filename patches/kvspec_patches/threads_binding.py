"""numa_utils.init_threads_binding: ranks of a server may share a NUMA node.

SGLang 0.5.17 needs a NUMA node for each rank, for kernels that the reference platform does not
have. Plain torch is not bound to cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], **kwargs: Any) -> Any:
    # Until 0.5.18 the number of ranks is `tp_size`.
    num_ranks = kwargs["world_size"] if "world_size" in kwargs else kwargs["tp_size"]
    return original(**kwargs) if num_ranks == 1 else None
