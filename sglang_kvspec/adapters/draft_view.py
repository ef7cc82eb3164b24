"""Draft view of a server, and the scorer of pages that it chooses by."""

from __future__ import annotations

from typing import Any, cast

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.seams import DRAFT_VIEWS
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.device_pages import DevicePages
from sglang_kvspec.runtime.draft_view import DraftView, MassView, ViewShape
from sglang_kvspec.runtime.page_scorer import NoScores, PageScorer, ReferenceScorer
from sglang_kvspec.runtime.ranks import Ranks


def make_view(
    config: KVSpecConfig, model: Any, geometry: KVGeometry, ranks: Ranks
) -> DraftView | None:
    """Make the view that the flag names; None for all pages. model: SGLang's ModelConfig."""
    name = config.draft_view
    if name == "all":
        return None
    # If there are more ranks than KV heads, several ranks hold copies of one head.
    first_head = ranks.rank * model.get_total_num_kv_heads() // ranks.size
    shape = ViewShape(geometry.num_layers, geometry.num_kv_heads, first_head, geometry.page_size)
    view: DraftView = DRAFT_VIEWS.load(name)(config, shape)
    return view


def make_scorer(
    config: KVSpecConfig, view: DraftView | None, runner: Any, attention: Any
) -> PageScorer:
    """Make the scorer for a view. attention: of the server, which has captured nothing yet."""
    drafts = config.drafts and runner.server_args.disaggregation_mode != "prefill"
    if view is None or not view.num_queries or not drafts:
        return NoScores()
    if not isinstance(attention, DeviceAttention):
        return ReferenceScorer(attention.kv, attention.keep_queries(view.num_queries))
    max_batch = runner.max_running_requests
    queries = attention.keep_queries(view.num_queries, max_batch, config.max_draft_len)
    num_slots, width = runner.req_to_token_pool.req_to_token.shape
    most_pages = -(-width // attention.kv.geometry.page_size)
    mass_view = cast("MassView", view)
    return DevicePages(attention.kv, queries, mass_view, max_batch, num_slots, most_pages)
