"""Draft view of a server, and the scorer of pages that it chooses by."""

from __future__ import annotations

from typing import Any

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.core.seams import DRAFT_VIEWS
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.runtime.draft_view import DraftView, ViewShape
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
    config: KVSpecConfig, view: DraftView | None, kv: PagedKVCache, attention: Any
) -> PageScorer:
    """Make the scorer for a view. attention: of the server. Raises UnsupportedError for a view that
    needs one on a GPU."""
    if view is None or not view.num_queries or not config.drafts:
        return NoScores()
    if not isinstance(kv, ReferenceKVCache):
        raise UnsupportedError(
            f"--kvspec-draft-view {config.draft_view} cannot be used on a GPU yet (allowed: all, "
            "recent)"
        )
    return ReferenceScorer(kv, attention.keep_queries(view.num_queries))
