"""get_draft_kv_pool: a self-speculating worker has no draft model, so it needs no draft pool.

SGLang 0.5.17 dereferences the draft runner of every algorithm but NGRAM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], *, draft_worker: Any, **kwargs: Any) -> Any:
    if draft_worker is not None and draft_worker.draft_worker is None:
        return None
    return original(draft_worker=draft_worker, **kwargs)
