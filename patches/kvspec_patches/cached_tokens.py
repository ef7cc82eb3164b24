"""SchedulerOutputStreamer.get_cached_tokens_details: adds hits from a prefix server, hits with kept
anchors in GPU memory, and drafts made before residuals arrived.

SGLang 0.5.17 has three tiers, and counts hits from a prefix server as hits in storage.
"""

from __future__ import annotations

from typing import Any


def hook(result: dict[str, Any] | None, self: Any, req: Any) -> dict[str, Any] | None:
    from sglang_kvspec.adapters import hit_breakdown

    loaded = hit_breakdown.tokens_of(req)._asdict()
    loaded["drafts_on_anchors"] = hit_breakdown.drafts_of(req)
    return {**(result or {}), **loaded} if any(loaded.values()) else result
