"""TpModelWorker.get_worker_info: no request may be longer than the pool holds it with its drafts.

SGLang 0.5.17 lets one in that fills the whole pool, and aborts it near its end for want of the
slots behind it.
"""

from __future__ import annotations

from typing import Any


def hook(result: Any, self: Any) -> Any:
    from sglang_kvspec.adapters.scheduling import shorten_requests

    return shorten_requests(result)
