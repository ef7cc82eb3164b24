"""SchedulerOutputStreamer.get_cached_tokens_details: adds hits from a prefix server, hits with kept
anchors in GPU memory, drafts made before residuals arrived, what drafts read, and proposals.

SGLang 0.5.17 has three tiers, and counts hits from a prefix server as hits in storage. It carries
these details to the process that answers, where spec_meta_info takes ours out again.
"""

from __future__ import annotations

from typing import Any

DRAFT_READS = "draft_reads"
NGRAM = "ngram"


def hook(result: dict[str, Any] | None, self: Any, req: Any) -> dict[str, Any] | None:
    from sglang_kvspec.adapters import hit_breakdown, request_drafts

    loaded = hit_breakdown.tokens_of(req)._asdict()
    loaded["drafts_on_anchors"] = hit_breakdown.drafts_of(req)
    told = {**(result or {}), **loaded} if any(loaded.values()) else result
    if req.finished():
        counts = request_drafts.counts_of(req)
        told = {**(told or {}), DRAFT_READS: counts.report()}
        if counts.steps:
            told[NGRAM] = counts.ngram_report()
    return told
