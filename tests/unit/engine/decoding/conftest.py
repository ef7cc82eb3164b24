"""A toy transformer, decoded plainly and by the engine's loop, which is driven as a server drives
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.checked_drafter import CheckedDrafter
from sglang_kvspec.engine.committer import Committer
from sglang_kvspec.engine.draft_budgets import OneBudget
from sglang_kvspec.engine.eager_drafter import EagerDrafter
from sglang_kvspec.engine.eager_verify import EagerVerify
from sglang_kvspec.engine.eager_wide_steps import EagerWideSteps
from sglang_kvspec.engine.loop import RoundLoop, RoundResult
from sglang_kvspec.engine.ngram_drafter import NgramDrafter
from sglang_kvspec.engine.observer import RoundObserver
from sglang_kvspec.engine.overlap import NoOverlap
from sglang_kvspec.engine.ports import Drafter, SchedulerParts, VerifyScheduler
from sglang_kvspec.engine.prompt_repeats import PromptRepeats
from sglang_kvspec.engine.proposed_steps import ProposedSteps
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.row_tokens import row_tokens
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.engine.selective_drafter import SelectiveDrafter, StepSeconds
from sglang_kvspec.engine.staggered_scheduler import StaggeredScheduler
from sglang_kvspec.engine.starter import RoundStarter
from sglang_kvspec.engine.verifier import Verifier
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, prefill_row
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.planning.draft_length import DraftCost
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.planning.round_plan import RoundBudget
from sglang_kvspec.runtime.draft_view import DraftReads, DraftView
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.page_scorer import NoScores, PageScorer, ReferenceScorer
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.reference_attention import ReferenceAttention
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import (
    SamplingParams,
    adjust_logits,
    choose_with_noise,
    distribution,
)
from sglang_kvspec.runtime.scored_tokens import SamePages, ScoredTokens
from sglang_kvspec.runtime.side_stream import SideStream
from sglang_kvspec.runtime.spec_sampler import SpecSampler, VerifyResult
from sglang_kvspec.runtime.token_scorer import TokenScorer
from sglang_kvspec.scorers.base import Scorer

# Encoded pages of the longest request, including the page that its last tokens reach.
LARGEST_PAGES = 7
VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 200, 4, 2, 16, 2
WIDTH = HEADS * HEAD_DIM
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ToyModel:
    """Transformer of random weights, scaled so that logits depend on attention, and 4-bit drafts
    err at times."""

    def __init__(self, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng) / shape[0] ** 0.5

        self.embedding = random(VOCAB, WIDTH) * VOCAB**0.5
        self.position = random(256, WIDTH) * 8
        self.q = [random(WIDTH, HEADS * HEAD_DIM) * 2 for _ in range(LAYERS)]
        self.k = [random(WIDTH, KV_HEADS * HEAD_DIM) for _ in range(LAYERS)]
        self.v = [random(WIDTH, KV_HEADS * HEAD_DIM) for _ in range(LAYERS)]
        self.out = [random(WIDTH, WIDTH) * 3 for _ in range(LAYERS)]
        self.head = random(WIDTH, VOCAB)

    def logits(self, tokens: list[int], positions: list[int], attend: Attend) -> torch.Tensor:
        h = self.embedding[tokens] + self.position[positions]
        for layer in range(LAYERS):
            normal = torch.nn.functional.layer_norm(h, (WIDTH,))
            q, k, v = (
                (normal @ w[layer]).unflatten(-1, (-1, HEAD_DIM)) for w in (self.q, self.k, self.v)
            )
            h = h + attend(layer, q, k, v).flatten(1) @ self.out[layer]
        return torch.nn.functional.layer_norm(h, (WIDTH,)) @ self.head * 2


@dataclass
class Request:
    """ngrams: stands in for RequestNgrams; None for those of the drafter."""

    prompt: list[int]
    num_new: int
    params: SamplingParams = field(default_factory=lambda: SamplingParams(top_k=1))
    pages: list[int] = field(default_factory=list)
    state: RequestState | None = None
    ngrams: Any = None
    logits: list[torch.Tensor] = field(default_factory=list)

    def take(self, verified: VerifyResult) -> list[int]:
        """Record the logits that the tokens of a verification were chosen from, and return the
        tokens."""
        self.logits += verified.logits[: len(verified.tokens)]
        return verified.tokens


class Output(NamedTuple):
    tokens: list[int]
    logits: torch.Tensor


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
    """Return causal attention, in fp64, of queries [n, heads, head_dim] at positions first.. over
    k, v [first + n, num_kv_heads, head_dim]."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(first)
    parts = (part.double().movedim(0, 1) for part in (q, k, v))
    out = scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
    return out.movedim(0, 1).to(q.dtype)


def plain_decode(model: ToyModel, request: Request) -> Output:
    """Decode one token at a time over a full-precision cache, greedy or seeded."""
    cache = [[torch.empty(0, KV_HEADS, HEAD_DIM)] * 2 for _ in range(LAYERS)]

    def attend(layer, q, k, v):
        first = len(cache[layer][0])
        old_k, old_v = cache[layer]
        cache[layer] = [torch.cat((old_k, k)), torch.cat((old_v, v))]
        return dense(q, *cache[layer], first)

    tokens, params = list(request.prompt), request.params
    num_done, rows = 0, []
    while len(tokens) < len(request.prompt) + request.num_new:
        positions = list(range(num_done, len(tokens)))
        logits = model.logits(tokens[num_done:], positions, attend)[-1:]
        logits = adjust_logits(logits, params, tokens[len(request.prompt) :], ())
        num_done = len(tokens)
        rows.append(logits[0])
        if params.is_greedy:
            tokens.append(int(logits.argmax()))
        else:
            assert params.seed is not None
            tokens += choose_with_noise(distribution(logits, params), params.seed, len(tokens))
    return Output(tokens[len(request.prompt) :], torch.stack(rows))


# Positions of the toy model. A piece of a repeated prompt has 16 tokens or fewer.
MOST_POSITIONS = 186


class ToyForward:
    """The engine's ModelForward over the toy model and the reference attention. rows: of every
    forward of a round."""

    def __init__(self, kv: ReferenceKVCache, model: ToyModel) -> None:
        self.attention, self.model = ReferenceAttention(kv), model
        self.rows: list[list[Row]] = []

    def run(
        self, batch: RoundBatch, rows: Mapping[int, Row], made: DraftedTokens | None = None
    ) -> torch.Tensor:
        assert made is None, "a CPU knows all drafts"
        self.rows.append(list(rows.values()))
        return self.run_rows(list(rows.values()), row_tokens(batch.states, rows).tokens)

    def run_rows(self, rows: list[Row], tokens: list[int]) -> torch.Tensor:
        positions = [p for row in rows for p in range(row.start, row.end)]
        with self.attention.planned(ForwardPlan(tuple(rows))):
            return self.model.logits(
                tokens, positions, lambda *args: self.attention.forward(*args, HEAD_DIM**-0.5)
            )


class NoArrivals:
    """Arrivals where all residuals are here."""

    may_be_pending = come_with_requests = False

    def note_verification(self, state: RequestState, num_emitted: int) -> None:
        pass


class NoGuard:
    """Guard that finds no corrupt page."""

    def drop(self, batch: RoundBatch, rows: dict[int, Row]) -> None:
        pass


class Engine:
    """Serve requests with at most `max_running` at once, staggered, and reuse freed pages."""

    def __init__(
        self,
        kv: ReferenceKVCache,
        model: ToyModel,
        config: KVSpecConfig,
        max_running: int = 3,
        *,
        drafter: Drafter | None = None,
        view: DraftView | None = None,
        with_ngrams: bool = False,
        skips_steps: bool = False,
        token_scorer: Scorer | None = None,
        by_tokens: bool = False,
        frees_anchors: bool = False,
    ) -> None:
        """drafter: replaces the model itself. with_ngrams: n-grams propose tokens to the model.
        skips_steps: where nothing is proposed to any request, ordinary steps follow to the end of
        the round, as on a GPU. token_scorer: chooses a tenth of the pages that drafts read, or with
        by_tokens of the tokens; with frees_anchors all heads read the same pages, and the other
        pages have no anchors."""
        self.with_ngrams, self.skips_steps = with_ngrams, skips_steps
        self.kv, self.config, self.max_running = kv, config, max_running
        self.drafter, self.view = drafter, view
        self.forward = ToyForward(kv, model)
        self.scorer: PageScorer = NoScores()
        if view is not None and view.num_queries:
            queries = self.forward.attention.keep_queries(view.num_queries)
            self.scorer = ReferenceScorer(kv, queries, view)
        self.repeats: PromptRepeats | None = None
        if token_scorer is not None:
            page_size = kv.geometry.page_size
            self.view = ScoredTokens(token_scorer.allocation, page_size, by_tokens=by_tokens)
            if frees_anchors:
                self.view = SamePages(page_size)
            self.scorer = TokenScorer(kv, token_scorer, None, 0, frees_anchors=frees_anchors)
            self.forward.attention.show(self.scorer)
            if self.scorer.needs_repeats:
                self.repeats = PromptRepeats(self.forward, MOST_POSITIONS, least_piece=16)
        # Without a budget of its own, a request reads all pages.
        reads_all = token_scorer is None and (view is None or not view.num_queries)
        self.budgets = OneBudget() if reads_all else OneBudget(0.1)
        self.keeper = PageKeeper(kv, config.recent_pages)
        self.sampler = SpecSampler(0, torch.device("cpu"))
        self.counters = SpecCounters()
        self.free_pages = list(range(kv.plan.num_pages, 0, -1))
        self.kept: set[int] = set()
        self.loop = self._loop(ResidualPlanner(kv))

    def _loop(self, planner: ResidualPlanner) -> RoundLoop:
        ranks, timer = Ranks(), PhaseTimer(self.kv.device)
        clock = RoundCostModel(1e-3, 4.0, piggyback=True)
        reads = DraftReads(self.view, self.kv.geometry.page_size)
        parts = SchedulerParts(self.config, clock, planner, ranks, DraftCost(), reads=reads)
        scheduler = self._scheduler(parts)
        starter = RoundStarter(
            kv=self.kv,
            side=SideStream(self.kv.device),
            drafter=self._drafter(ranks),
            planner=planner,
            arrivals=NoArrivals(),
        )
        verifier = Verifier(
            eager=EagerVerify(self.forward),
            captured=None,
            scheduler=scheduler,
            planner=planner,
            guard=NoGuard(),
            sampler=self.sampler,
            ranks=ranks,
            timer=timer,
            page_size=self.kv.geometry.page_size,
            view=self.view,
            most_piggyback=64 if self.drafter is None else 0,
        )
        return RoundLoop(
            reads=parts.reads,
            scheduler=scheduler,
            planner=planner,
            starter=starter,
            verifier=verifier,
            committer=Committer(
                self.sampler, self.keeper, NoArrivals(), ranks, self.counters, parts.reads
            ),
            overlap=NoOverlap(),
            observer=RoundObserver(self.counters, planner.speeds, clock, timer),
            speeds=planner.speeds,
            pages=self.keeper,
            arrivals=NoArrivals(),
            prompt_reader=EagerDrafter(
                self.forward, self.sampler, ranks, self.kv.geometry.page_size
            ),
            sampler=self.sampler,
            ranks=ranks,
            budgets=self.budgets,
            scorer=self.scorer,
        )

    def _drafter(self, ranks: Ranks) -> Drafter:
        if self.drafter is not None:
            return CheckedDrafter("other", self.drafter, VOCAB)
        page_size = self.kv.geometry.page_size
        own = EagerDrafter(self.forward, self.sampler, ranks, page_size, self.view)
        if not self.with_ngrams:
            return own
        steps = EagerWideSteps(self.forward, page_size, self.view)
        proposed = ProposedSteps(steps, self.sampler, ranks, self.counters.drafts)
        if not self.skips_steps:
            return NgramDrafter(proposed)
        seconds = StepSeconds(1e-3, lambda num_requests: {4: 1e-3, 16: 2e-3})
        device = torch.device("cpu")
        return SelectiveDrafter(proposed, own, seconds, ranks, device, always=True, now=lambda: 0.0)

    def _scheduler(self, parts: SchedulerParts) -> VerifyScheduler:
        return StaggeredScheduler(parts)

    def serve(self, requests: Sequence[Request], chunk: int = 10**6) -> list[Output]:
        waiting, running = list(requests), []
        while waiting or running:
            while waiting and len(running) < self.max_running:
                running.append(waiting.pop(0))
                self._prefill(running[-1], chunk)
            self._run_round(running)
            for request in [r for r in running if r.state.remaining == 0]:
                running.remove(request)
                self._release(request)
            self.kv.check_integrity()
        return [Output(r.state.output, torch.stack(r.logits)) for r in requests]

    def _prefill(self, request: Request, chunk: int) -> None:
        """Compute the prompt behind the pages that the request brings, which hold its start."""
        size = self.kv.geometry.page_size
        self.kept.update(request.pages)
        start = len(request.pages) * size
        while start < len(request.prompt):
            length = min(chunk, len(request.prompt) - start)
            pages = self._pages(request, start + length)
            recent = self.config.recent_pages
            row = prefill_row(start, length, pages, page_size=size, recent_pages=recent)
            self.keeper.note_use([row.pages])
            logits = self.forward.run_rows([row], request.prompt[start : row.end])
            self.keeper.commit(row.pages, row.start, row.end)
            start = row.end
        (first,) = request.take(self.sampler.first(logits[-1:], request.params, (), start, None))
        request.state = RequestState(
            rid=str(id(request)),
            committed_len=start,
            pending=first,
            output=[first],
            params=request.params,
            remaining=request.num_new - 1,
            prompt=request.prompt,
            ngrams=request.ngrams,
        )
        self.budgets.choose([request.state])
        if self.repeats is not None:
            self.repeats.run(RoundBatch([request.state], [row.pages], [request]), [0])
        self.scorer.score([(0, request.state, row.pages)])

    def _run_round(self, running: list[Request]) -> RoundResult:
        states = [r.state for r in running]
        # Pages for all drafts of a round.
        most = [s.next_position + s.cap_len(self.config.max_draft_len) + 1 for s in states]
        ends = [min(end, len(r.prompt) + r.num_new) for r, end in zip(running, most, strict=True)]
        pages = [self._pages(r, end) for r, end in zip(running, ends, strict=True)]
        batch = RoundBatch(states, pages, running, wants_logprobs=True)
        done = self.loop.run_round(batch)
        for request, entry in zip(running, done.emitted, strict=True):
            if entry is not None:
                assert entry.tokens, "output differs in length: the logits allow no choice"
                request.take(entry)
                state = request.state
                assert not state.drafts, "a verification left drafts behind"
                assert state.committed_len == len(request.prompt) + len(state.output) - 1
        return done

    def _pages(self, request: Request, num_tokens: int) -> torch.Tensor:
        needed = -(-num_tokens // self.kv.geometry.page_size)
        while len(request.pages) < needed:
            request.pages.append(self.free_pages.pop())
        return torch.tensor(request.pages[:needed])

    def _release(self, request: Request) -> None:
        """Keep `kept` pages as a cached prefix, and free the others for the next request."""
        full = request.state.committed_len // self.kv.geometry.page_size
        self.keeper.retire(torch.tensor(request.pages[:full], dtype=torch.int64))
        gone = [page for page in request.pages if page not in self.kept]
        if isinstance(self.scorer, TokenScorer):
            self.scorer.on_pages_freed(gone)
        self.kv.free_pages(gone)
        self.free_pages += gone


class FixedRounds:
    """Schedule of up to five drafts a round. The link moves `link_pages` while they are made."""

    piggybacks_sampled = False
    link_share = None

    def __init__(self, most: int, link_pages: int) -> None:
        self._most = most
        self._budget = RoundBudget(link_pages, 2 * link_pages)

    def plan(self, states, late=(), num_drafts=None) -> RoundSchedule:
        lens = [max(0, min(5, s.cap_len(self._most) - len(s.drafts))) for s in states]
        return RoundSchedule(lens, self._budget)

    def piggybacks(self, state: RequestState, num_drafts: int) -> bool:
        return False


class RoundEngine(Engine):
    """Engine with the schedule `rounds`, whose link moves `link_pages` while a round drafts."""

    def __init__(self, *args, link_pages: int = 2, **options) -> None:
        self.link_pages = link_pages
        self.num_waited = 0
        super().__init__(*args, **options)

    def _scheduler(self, parts: SchedulerParts) -> VerifyScheduler:
        return FixedRounds(min(self.config.max_draft_len, 7), self.link_pages)

    def _run_round(self, running: list[Request]) -> RoundResult:
        before = self.kv.residuals.bytes_streamed
        done = super()._run_round(running)
        if self.kv.plan.cache_pages >= LARGEST_PAGES:
            assert self.kv.residuals.bytes_streamed == before, "a page was not fetched as planned"
        self.num_waited += sum(entry is None for entry in done.emitted)
        return done


def assert_same_output(served: Sequence[Output], plain: Sequence[Output]) -> None:
    """Check for the same tokens, chosen from the same logits up to fp32 rounding."""
    for index, (got, want) in enumerate(zip(served, plain, strict=True)):
        pairs = list(zip(got.tokens, want.tokens, strict=True))
        other = [at for at, (a, b) in enumerate(pairs) if a != b]
        assert not other, f"request {index} differs in token {other[0]}"
        difference = (got.logits - want.logits).abs()
        # Forbidden tokens have -inf in both outputs; otherwise the difference is infinite.
        error = difference.where(got.logits != want.logits, 0.0).amax(-1)
        # fp32 rounding moves logits, of size 8, by less than 1e-5. Eight bits instead of 32 move
        # them by 1e-2.
        assert error.max() < 1e-4, f"request {index} differs in the logits of {error.argmax()}"


@pytest.fixture(scope="session")
def toy(make_kv) -> SimpleNamespace:
    """The classes of this module, one model, and a pool of its shape."""

    def kv(**options) -> ReferenceKVCache:
        options = {"num_pages": 24, "window_pages": 9, "cache_pages": 2} | options
        return make_kv(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, **options)

    return SimpleNamespace(
        Engine=Engine,
        RoundEngine=RoundEngine,
        Request=Request,
        assert_same_output=assert_same_output,
        dense=dense,
        kv=kv,
        model=ToyModel(),
        plain_decode=plain_decode,
        vocab=VOCAB,
    )
