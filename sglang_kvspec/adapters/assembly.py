"""Assembly of the engine for one rank of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_kvspec.adapters.allocation_warm_up import warm_up_allocation
from sglang_kvspec.adapters.arrivals import ServerArrivals
from sglang_kvspec.adapters.captured_wide_steps import CapturedWideSteps
from sglang_kvspec.adapters.corrupt_pages import CorruptPageGuard
from sglang_kvspec.adapters.cuda_graph_drafter import PLAIN_STEPS, CudaGraphDrafter
from sglang_kvspec.adapters.draft_view import make_budgets, make_scorer, make_view
from sglang_kvspec.adapters.draft_weights import DraftForward, DraftWeights
from sglang_kvspec.adapters.forward_capture import ForwardCapture
from sglang_kvspec.adapters.page_table import PageTable
from sglang_kvspec.adapters.ragged_forward import RaggedForward
from sglang_kvspec.adapters.transfer.disaggregation_role import DisaggregationRole
from sglang_kvspec.adapters.verify_graphs import VerifyGraphs, sizes_of
from sglang_kvspec.adapters.wide_graphs import MOST_TOKENS
from sglang_kvspec.core.config import AUTO_SCHEDULE, KVSpecConfig
from sglang_kvspec.core.seams import DRAFTERS, VERIFY_SCHEDULERS
from sglang_kvspec.engine.checked_drafter import CheckedDrafter
from sglang_kvspec.engine.checked_scheduler import CheckedScheduler
from sglang_kvspec.engine.committer import Committer
from sglang_kvspec.engine.eager_drafter import EagerDrafter
from sglang_kvspec.engine.eager_verify import EagerVerify
from sglang_kvspec.engine.eager_wide_steps import EagerWideSteps
from sglang_kvspec.engine.loop import RoundLoop
from sglang_kvspec.engine.ngram_drafter import NgramDrafter
from sglang_kvspec.engine.observer import RoundObserver
from sglang_kvspec.engine.overlap import NoOverlap, Overlap, OverlappedRounds
from sglang_kvspec.engine.ports import (
    CapturedVerify,
    Drafter,
    ModelForward,
    SchedulerParts,
    VerifyScheduler,
)
from sglang_kvspec.engine.prompt_repeats import (
    MOST_REPEATED,
    MOST_REPEATED_ON_GPU,
    PromptRepeats,
)
from sglang_kvspec.engine.proposed_steps import ProposedSteps
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.selective_drafter import SelectiveDrafter, StepSeconds
from sglang_kvspec.engine.starter import RoundStarter
from sglang_kvspec.engine.verifier import Verifier
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.planning.draft_budget import ALL_PAGES
from sglang_kvspec.planning.draft_length import DraftCost, most_auto_drafts
from sglang_kvspec.planning.proposals import SharedNgrams
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.device_pages import DevicePages
from sglang_kvspec.runtime.draft_view import DraftReads, DraftView, head_lists
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.piggyback_rows import MOST_PIGGYBACK
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.side_stream import SideStream
from sglang_kvspec.runtime.spec_sampler import SpecSampler
from sglang_kvspec.runtime.token_scorer import TokenScorer

# Assumed seconds of a draft step on a CPU, where no step is timed at the start.
CPU_STEP_S = 1e-3
# Seconds of a round on a CPU while a client reads a stream. The stream pauses for a round if the
# first draft is rejected. Rounds of twice this length give no more tokens a second.
CPU_STREAM_ROUND_S = 0.35


@dataclass(slots=True)
class WorkerParts:
    """Parts that prefills and rounds of one rank share. disaggregation: None unless the server is a
    prefill or a decode server. view: pages that drafts read, None for all. draft_weights: copies of
    the model's weights for drafts, None where these use the model's own."""

    config: KVSpecConfig
    server_args: Any
    runner: Any
    pool: Any
    allocator: Any
    kv: PagedKVCache
    pages: PageKeeper
    table: PageTable
    forward: RaggedForward
    sampler: SpecSampler
    ranks: Ranks
    counters: SpecCounters
    guard: CorruptPageGuard
    disaggregation: DisaggregationRole | None
    arrivals: ServerArrivals
    view: DraftView | None
    draft_weights: DraftWeights | None


class Captured(NamedTuple):
    """Replays of forwards. verify: None where the server does not draft."""

    drafter: CudaGraphDrafter
    verify: CapturedVerify | None


def share_parts(
    config: KVSpecConfig,
    server_args: Any,
    runner: Any,
    forward: RaggedForward,
    sampler: SpecSampler,
    ranks: Ranks,
    counters: SpecCounters,
    req_to_token_pool: Any,
    allocator: Any,
    draft_weights: DraftWeights | None,
) -> WorkerParts:
    """Make the parts that need SGLang's pools. Sets the pool's keeper."""
    pool = allocator.get_kvcache()
    kv = pool.kv
    pages = PageKeeper(kv, config.recent_pages)
    pool.keeper = pages
    disaggregation = None
    if server_args.disaggregation_mode != "null":
        disaggregation = DisaggregationRole(config, pool, runner, server_args, ranks)
    return WorkerParts(
        config=config,
        server_args=server_args,
        runner=runner,
        pool=pool,
        allocator=allocator,
        kv=kv,
        pages=pages,
        table=PageTable(req_to_token_pool, kv.geometry.page_size),
        forward=forward,
        sampler=sampler,
        ranks=ranks,
        counters=counters,
        guard=CorruptPageGuard(kv.residuals.corrupt, ranks, counters),
        disaggregation=disaggregation,
        arrivals=ServerArrivals(pool, None if disaggregation is None else disaggregation.decoding),
        view=make_view(config, runner.model_config, kv, ranks),
        draft_weights=draft_weights,
    )


def schedule_of(config: KVSpecConfig) -> str:
    """Return the name of the schedule in effect: rounds, staggered or that of another package."""
    return "rounds" if config.schedule == AUTO_SCHEDULE else config.schedule


def build_loop(parts: WorkerParts) -> RoundLoop:
    """Build the round loop of a rank. On a GPU this captures CUDA graphs."""
    config, kv, ranks = parts.config, parts.kv, parts.ranks
    most_piggyback = _most_piggyback(parts)
    scorer = make_scorer(config, parts.view, parts.runner, parts.forward.attention, ranks)
    chosen = scorer if isinstance(scorer, DevicePages) else None
    captured = factories.captured(parts, most_piggyback, chosen)
    holds_all = captured is not None and not kv.plan.host_pages
    plain_steps = min(PLAIN_STEPS, config.max_draft_len + 1) if holds_all else 0
    clock = _clock(parts, captured, has_plain=holds_all, piggyback=most_piggyback > 0)
    planner = ResidualPlanner(kv)
    given = _scheduler_parts(parts, clock, planner, plain_steps)
    scheduler = factories.scheduler(parts, given)
    timer = PhaseTimer(kv.device)
    own: EagerDrafter | CudaGraphDrafter
    if captured is None:
        page_size = kv.geometry.page_size
        own = EagerDrafter(_draft_forward(parts), parts.sampler, ranks, page_size, parts.view)
    else:
        own = captured.drafter
    starter = RoundStarter(
        kv=kv,
        side=factories.side(kv),
        drafter=_drafter(parts, own),
        planner=planner,
        arrivals=parts.arrivals,
        plain=captured.drafter if captured is not None and holds_all else None,
        plain_steps=plain_steps,
    )
    overlap: Overlap = NoOverlap()
    if captured is not None:
        overlap = factories.overlap(starter, scheduler, parts.pages, config.max_draft_len)
    return RoundLoop(
        scheduler=scheduler,
        planner=planner,
        starter=starter,
        verifier=Verifier(
            eager=EagerVerify(parts.forward),
            captured=None if captured is None else captured.verify,
            scheduler=scheduler,
            planner=planner,
            guard=parts.guard,
            sampler=parts.sampler,
            ranks=ranks,
            timer=timer,
            page_size=kv.geometry.page_size,
            # A GPU that scores pages selects them, too.
            view=parts.view if chosen is None else None,
            most_piggyback=most_piggyback,
            drafts_eagerly=not isinstance(kv, GpuKVCache),
        ),
        committer=Committer(
            parts.sampler, parts.pages, parts.arrivals, ranks, parts.counters, given.reads, scorer
        ),
        overlap=overlap,
        observer=RoundObserver(parts.counters, planner.speeds, clock, timer),
        speeds=planner.speeds,
        pages=parts.pages,
        arrivals=parts.arrivals,
        prompt_reader=own,
        sampler=parts.sampler,
        ranks=ranks,
        reads=given.reads,
        budgets=make_budgets(config, parts.view, clock, ranks, kv.geometry.page_size),
        scorer=scorer,
        captures=captured is not None,
    )


def make_repeats(parts: WorkerParts, loop: RoundLoop) -> PromptRepeats | None:
    """Make the repeats of prompts that the loop's scorer asks for, None if it asks for none."""
    scorer = loop.scorer
    if not isinstance(scorer, TokenScorer) or not scorer.needs_repeats:
        return None
    if parts.config.asked_budget == ALL_PAGES:
        return None
    most_tokens = MOST_REPEATED_ON_GPU if isinstance(parts.kv, GpuKVCache) else MOST_REPEATED
    context_len = parts.runner.model_config.context_len
    return PromptRepeats(parts.forward, context_len, most_tokens=most_tokens)


def _most_piggyback(parts: WorkerParts) -> int:
    """Return how many requests may piggyback a draft on the forward in which others verify."""
    config, arrivals = parts.config, parts.arrivals
    # `rounds` holds no request back if all residuals stay in the cache. On a decode server, a
    # request drafts no more than it must. Any other schedule may hold requests back.
    takes_turns = schedule_of(config) != "rounds"
    waits = bool(parts.kv.plan.host_pages) and not arrivals.come_with_requests
    # Drafts of another drafter than the model have no KV that one more draft could read.
    if config.max_draft_len and config.drafts_on_anchors and (takes_turns or waits):
        return int(min(parts.runner.max_running_requests, MOST_PIGGYBACK))
    return 0


def _clock(
    parts: WorkerParts, captured: Captured | None, *, has_plain: bool, piggyback: bool
) -> RoundCostModel:
    page = parts.kv.plan.page_bytes
    both = page.residual if parts.config.target == "exact" else page.anchor + page.residual
    step_s, target_step_s, row_per_token = CPU_STEP_S, 0.0, None
    if captured is not None:
        step_s = captured.drafter.empty_draft_step_s
        target_step_s = captured.drafter.empty_step_s
        # Anchors are read about as fast as weights.
        weights = sum(part.nbytes for part in parts.runner.model.parameters())
        row_per_token = page.anchor / parts.kv.geometry.page_size * target_step_s / weights
    return RoundCostModel(
        step_s,
        both / page.anchor,
        has_plain=has_plain,
        row_per_token=row_per_token,
        piggyback=piggyback,
        target_step=target_step_s,
    )


def _capture(
    parts: WorkerParts, most_piggyback: int, chosen: DevicePages | None
) -> Captured | None:
    """Capture CUDA graphs after a warm-up. Return None on a CPU and on a prefill server. chosen:
    selects the pages that drafts read, for a MassView."""
    if not isinstance(parts.kv, GpuKVCache):
        return None
    runner, attention, longest = parts.runner, parts.forward.attention, parts.config.max_draft_len
    assert isinstance(attention, DeviceAttention)
    attention.warm_up(longest)
    table = runner.req_to_token_pool.req_to_token
    warm_up_allocation(parts.allocator, table, runner.max_running_requests)
    if parts.server_args.disaggregation_mode == "prefill":
        # A prefill server makes no steps.
        return None
    sizes = sizes_of(runner, attention, longest, most_piggyback) if longest else ()
    is_wide = parts.config.drafter == "ngram" and longest > 0
    tokens = [most_piggyback + size.num_tokens for size in sizes]
    if is_wide:
        tokens.append(MOST_TOKENS)
    forward = ForwardCapture(runner, max([runner.max_running_requests, *tokens]))
    lists = head_lists(parts.view, parts.kv.geometry, parts.kv.device)
    drafter = CudaGraphDrafter(
        runner,
        forward,
        attention,
        parts.kv,
        longest,
        parts.sampler,
        parts.ranks,
        parts.view,
        lists,
        chosen,
        parts.draft_weights,
        is_wide=is_wide,
    )
    verify = None
    if sizes:
        verify = VerifyGraphs(
            runner, forward, attention, longest, sizes, most_piggyback, lists, chosen
        )
    return Captured(drafter, verify)


def _draft_forward(parts: WorkerParts) -> ModelForward:
    weights = parts.draft_weights
    return parts.forward if weights is None else DraftForward(parts.forward, weights)


def _drafter(parts: WorkerParts, own: EagerDrafter | CudaGraphDrafter) -> Drafter:
    """Return the drafter that --kvspec-drafter names. own: drafts of the model, one a step."""
    name = parts.config.drafter
    if name == "self":
        return own
    if name == "ngram":
        return _ngram_drafter(parts, own)
    vocab_size = int(parts.runner.model_config.vocab_size)
    return CheckedDrafter(name, DRAFTERS.load(name)(parts.config, vocab_size), vocab_size)


def _ngram_drafter(parts: WorkerParts, own: EagerDrafter | CudaGraphDrafter) -> Drafter:
    shared = SharedNgrams() if parts.config.ngram_shared else None
    given = (parts.sampler, parts.ranks, parts.counters.drafts, shared)
    if not isinstance(own, CudaGraphDrafter):
        page_size = parts.kv.geometry.page_size
        steps = EagerWideSteps(_draft_forward(parts), page_size, parts.view)
        return NgramDrafter(ProposedSteps(steps, *given))
    if own.wide is None:
        # The server does not draft.
        return own
    return SelectiveDrafter(
        ProposedSteps(CapturedWideSteps(own, own.wide), *given),
        own,
        StepSeconds(own.empty_draft_step_s, own.wide.empty_step_s),
        parts.ranks,
        torch.device(parts.kv.device),
        always=parts.config.ngram_always,
    )


def _scheduler_parts(
    parts: WorkerParts, clock: RoundCostModel, planner: ResidualPlanner, plain_steps: int
) -> SchedulerParts:
    page = parts.kv.plan.page_bytes
    attention = parts.forward.attention
    is_on_device = isinstance(attention, DeviceAttention)
    tokens_of_a_pass = attention.tokens_of_a_pass if is_on_device else None
    return SchedulerParts(
        config=parts.config,
        round_costs=clock,
        planner=planner,
        ranks=parts.ranks,
        draft_cost=DraftCost(draft=page.anchor / page.plain),
        plain_steps=plain_steps,
        reads=DraftReads(parts.view, parts.kv.geometry.page_size),
        # No limit on a GPU: a round takes 0.1 s or less there, and its drafts are worth more.
        stream_round_s=None if isinstance(parts.kv, GpuKVCache) else CPU_STREAM_ROUND_S,
        most_auto_drafts=most_auto_drafts(tokens_of_a_pass),
    )


def _scheduler(parts: WorkerParts, given: SchedulerParts) -> VerifyScheduler:
    name = schedule_of(parts.config)
    scheduler: VerifyScheduler = VERIFY_SCHEDULERS.load(name)(given)
    if name in VERIFY_SCHEDULERS.built_in:
        return scheduler
    return CheckedScheduler(name, scheduler, parts.config.max_draft_len)


@dataclass(slots=True)
class Factories:
    """Makers of the parts that differ between machines and schedules; tests inject others."""

    captured: Callable[[WorkerParts, int, DevicePages | None], Captured | None] = _capture
    scheduler: Callable[[WorkerParts, SchedulerParts], VerifyScheduler] = _scheduler
    side: Callable[[PagedKVCache], SideStream] = lambda kv: SideStream(torch.device(kv.device))
    overlap: Callable[..., Overlap] = OverlappedRounds


factories = Factories()
