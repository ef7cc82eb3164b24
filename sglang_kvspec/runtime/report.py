"""Section `kvspec` of /server_info: plain data, ready for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.units import GIB
from sglang_kvspec.kv.anchor_places import AnchorPlaces
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.planning.capacity import CapacityPlan
from sglang_kvspec.runtime.metrics import HIT_TIERS, KEPT_TIERS, SpecCounters


def build_report(
    config: KVSpecConfig, kv: PagedKVCache, counters: SpecCounters, num_allocated: int
) -> dict[str, Any]:
    """Return configuration, pool sizes in pages and bytes, page states, and counters.

    num_allocated: pages that SGLang has allocated. On an idle server these are the pages of cached
    prefixes, all of them encoded.
    """
    plan, geometry = kv.plan, kv.geometry
    size, page = geometry.page_size, plan.page_bytes
    return {
        "config": config.to_dict(),
        "max_draft_len": config.max_draft_len,
        "anchor_bits_per_element": kv.codec.anchor_bits_per_element,
        "pools": {
            "page_size": size,
            "num_pages": plan.num_pages,
            "num_pages_allocated": num_allocated,
            "window_pages": plan.window_pages,
            "window_pages_used": len(kv.window.slots),
            "residual_cache_pages": plan.cache_pages,
            "residual_store_pages": plan.host_pages,
            "residual_store_form": None if not plan.host_pages else page.store_form,
            "kept_anchor_pages": plan.kept_anchor_pages,
            "anchor_pages": plan.anchor_pages,
            "kv_bytes": plan.hbm_bytes,
            "kv_bytes_allocated": kv.hbm_nbytes,
            "host_bytes": plan.host_bytes,
            "bytes_per_token_plain": page.plain / size,
            "bytes_per_token_anchor": page.anchor / size,
            "bytes_per_token_residual": page.residual / size,
            "bytes_per_token_stored": page.stored / size if plan.host_pages else 0,
            "max_total_num_tokens": plan.num_pages * size,
            "plain_tokens_in_same_memory": plan.plain_pages * size,
            "limited_by": plan.binding,
        },
        "freed_anchors": _freed_anchors(kv.anchor_places),
        "page_states": kv.residuals.table.counts(),
        "unfit_records": kv.residuals.packed.num_unfit if kv.residuals.packed else 0,
        "bytes_fetched": kv.residuals.bytes_fetched,
        "bytes_streamed": kv.residuals.bytes_streamed,
        "counters": {
            "iterations": counters.iterations,
            "mixed_iterations": counters.mixed_iterations,
            "drafted_piggyback": counters.drafted_piggyback,
            "drafted": counters.drafted,
            "accepted": counters.accepted,
            "rejected": counters.rejected,
            "verifications": counters.verifications,
            "emitted": counters.emitted,
            "emitted_without_drafting": counters.plain,
            "verification_wait_iterations": counters.waits,
            "requests_with_corrupt_residuals": counters.corrupt,
            "mean_accept_len": counters.mean_accept_len,
            "hit_tokens": {tier: counters.hit_tokens[tier] for tier in HIT_TIERS},
            "kept_anchors": {tier: counters.kept_anchors[tier] for tier in KEPT_TIERS},
            "accept_histogram": {str(n): c for n, c in sorted(counters.accept_histogram.items())},
        },
        "draft_reads": counters.drafts.report(),
        "ngram": counters.drafts.ngram_report() | {"step_ms": counters.drafts.step_ms},
    }


def _freed_anchors(places: AnchorPlaces) -> dict[str, int] | None:
    """Return the pages with anchors and the counters of a server that frees anchors; None where
    every page has a place for them."""
    if places.holds_all:
        return None
    return {"pages_with_anchors": places.num_taken, **asdict(places.counters)}


def resolved_values(
    config: KVSpecConfig, plan: CapacityPlan, *, schedule: str, view: str, num_sharing: int
) -> dict[str, Any]:
    """Return the settings that the server uses, in the flags' units, including those that no flag
    set.

    num_sharing: ranks of this server on one machine, which share --kvspec-host-gb. The value None
    stands for a feature that is off.
    """
    page = plan.page_bytes
    cache_bytes = plan.cache_pages * page.residual
    kept_bytes = plan.kept_anchor_pages * page.anchor
    has_server = config.prefix_server is not None
    return {
        "schedule": schedule,
        "draft_view": view,
        "max_draft_len": config.max_draft_len,
        "recent_pages": config.recent_pages,
        "host_gb": plan.host_bytes * num_sharing / GIB,
        "host_bytes": plan.host_bytes * num_sharing,
        "residual_hbm_fraction": cache_bytes / plan.hbm_bytes,
        "residual_cache_bytes": cache_bytes,
        "recent_window_bytes": plan.window_bytes,
        "prefix_hbm_fraction": kept_bytes / plan.hbm_bytes,
        "kept_anchor_bytes": kept_bytes,
        "prefix_host_gb": config.prefix_host_gb or None,
        "prefix_gb": None if config.prefix_dir is None else config.prefix_disk_gb,
        "prefix_publish_gbps": config.publish_gbps if has_server else None,
        "prefix_wait_ms": config.prefix_wait_s * 1000 if has_server else None,
        "link_gbps": config.link_gbps,
    }
