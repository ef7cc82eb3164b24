"""Where a request keeps its row of the page table and the lengths of its KV: on the request, and
since 0.5.19 in its field `kv`."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import schedule_batch

__all__ = ["kv_of"]


def _is_own_field() -> bool:
    kept = getattr(schedule_batch, "ReqKvInfo", None)
    return "req_pool_idx" in getattr(kept, "__dataclass_fields__", ())


if _is_own_field():

    def kv_of(req: Any) -> Any:
        """Return what has req_pool_idx, kv_committed_len and cache_protected_len of a request."""
        return req.kv

else:

    def kv_of(req: Any) -> Any:
        """Return what has req_pool_idx, kv_committed_len and cache_protected_len of a request."""
        return req
