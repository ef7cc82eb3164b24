"""SchedulerOutputStreamer.get_cached_tokens_details: which hits came from a prefix server, of which
the anchors were in GPU memory still, and what was drafted before residuals came.

SGLang 0.5.17 has three tiers, and counts the first as storage's.
"""

from __future__ import annotations

from typing import Any


def hook(result: dict[str, Any] | None, self: Any, req: Any) -> dict[str, Any] | None:
    from sglang_kvspec.adapters import hit_breakdown

    loaded = hit_breakdown.tokens_of(req)._asdict()
    loaded["drafts_on_anchors"] = hit_breakdown.drafts_of(req)
    return {**(result or {}), **loaded} if any(loaded.values()) else result
