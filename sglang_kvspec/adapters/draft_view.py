"""Draft view of a server, and the scorer of pages or tokens that it chooses by."""

from __future__ import annotations

from typing import Any, cast

from sglang_kvspec.adapters.token_scorer import make_token_scorer
from sglang_kvspec.core.config import AUTO_DRAFT_VIEW, KVSpecConfig
from sglang_kvspec.core.seams import DRAFT_VIEWS
from sglang_kvspec.engine.draft_budgets import AutoBudgets, DraftBudgets, OneBudget
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.planning.draft_budget import allowed_budgets
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.runtime.budget_views import fixed_budget
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.device_pages import DevicePages
from sglang_kvspec.runtime.draft_view import DraftView, MassView, ViewShape
from sglang_kvspec.runtime.page_scorer import NoScores, PageScorer, ReferenceScorer
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.scored_tokens import SamePages, ScoredPageLists, ScoredTokens
from sglang_kvspec.scorers.making import allocation_of


def view_of(config: KVSpecConfig, *, on_gpu: bool) -> str:
    """Return the name of the view in effect, or the compressor. auto: reading fewer pages saves no
    time on a CPU."""
    if config.compressor is not None:
        return config.compressor
    if config.draft_view != AUTO_DRAFT_VIEW:
        return config.draft_view
    return "pages" if on_gpu and config.drafts_on_anchors else "all"


def make_view(config: KVSpecConfig, model: Any, kv: PagedKVCache, ranks: Ranks) -> DraftView | None:
    """Make the view in effect; None for all pages. model: SGLang's ModelConfig."""
    name, geometry = view_of(config, on_gpu=isinstance(kv, GpuKVCache)), kv.geometry
    compressor = config.parsed_compressor
    if compressor is not None:
        allocation = allocation_of(compressor)
        if allocation == "same" and compressor.by == "pages":
            return SamePages(geometry.page_size)
        if isinstance(kv, GpuKVCache):
            return ScoredPageLists(allocation, geometry.page_size)
        by_tokens = compressor.by == "tokens"
        return ScoredTokens(allocation, geometry.page_size, by_tokens=by_tokens)
    if name == "all":
        return None
    first_head = first_kv_head(model, ranks)
    shape = ViewShape(geometry.num_layers, geometry.num_kv_heads, first_head, geometry.page_size)
    view: DraftView = DRAFT_VIEWS.load(name)(config, shape)
    return view


def first_kv_head(model: Any, ranks: Ranks) -> int:
    """Return the number of a rank's first KV head among all of the model, SGLang's ModelConfig. If
    there are more ranks than KV heads, several ranks hold copies of one head."""
    return int(ranks.rank * model.get_total_num_kv_heads() // ranks.size)


def make_budgets(
    config: KVSpecConfig,
    view: DraftView | None,
    clock: RoundCostModel,
    ranks: Ranks,
    page_size: int,
) -> DraftBudgets:
    """Make the choice of budgets for a view."""
    if config.compressor is not None:
        return OneBudget(fixed_budget(config))
    if view is None or not view.num_queries:
        return OneBudget()
    may_read_all = config.draft_view == AUTO_DRAFT_VIEW
    allowed = allowed_budgets(config.asked_budget, may_read_all=may_read_all)
    if len(allowed) == 1:
        return OneBudget(allowed[0])
    return AutoBudgets(allowed, clock, ranks, page_size)


def make_scorer(
    config: KVSpecConfig, view: DraftView | None, runner: Any, attention: Any, ranks: Ranks
) -> PageScorer:
    """Make the scorer for a view. attention: of the server, which has captured nothing yet."""
    drafts = config.drafts and runner.server_args.disaggregation_mode != "prefill"
    compressor = config.parsed_compressor
    if compressor is not None and drafts:
        first_head = first_kv_head(runner.model_config, ranks)
        return make_token_scorer(compressor, runner, attention, first_head)
    if view is None or not view.num_queries or not drafts:
        return NoScores()
    if not isinstance(attention, DeviceAttention):
        return ReferenceScorer(attention.kv, attention.keep_queries(view.num_queries), view)
    max_batch = runner.max_running_requests
    queries = attention.keep_queries(view.num_queries, max_batch, config.max_draft_len)
    num_slots, width = runner.req_to_token_pool.req_to_token.shape
    most_pages = -(-width // attention.kv.geometry.page_size)
    mass_view = cast("MassView", view)
    return DevicePages(attention.kv, queries, mass_view, max_batch, num_slots, most_pages)
