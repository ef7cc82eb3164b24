"""TpModelWorker.get_worker_info: limits requests to the length that the pool holds with drafts.

SGLang 0.5.17 admits a request that fills the whole pool. It then aborts the request near its end,
as there are no slots for its drafts.
"""

from __future__ import annotations

from typing import Any


def hook(result: Any, self: Any) -> Any:
    from sglang_kvspec.adapters.scheduling import shorten_requests

    return shorten_requests(result)
