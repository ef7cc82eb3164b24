"""get_draft_kv_pool: a self-speculating worker has no draft model and no pool of one.

SGLang 0.5.17 dereferences the draft runner of every algorithm but NGRAM. Remove when it handles a
worker whose draft_worker is None (0.5.23 does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool"
KIND = "around"
SCOPE = "kvspec"


def hook(original: Callable[..., Any], *, draft_worker: Any, **kwargs: Any) -> Any:
    if draft_worker is not None and draft_worker.draft_worker is None:
        return None
    return original(draft_worker=draft_worker, **kwargs)
