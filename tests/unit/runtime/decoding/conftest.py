"""A toy transformer, decoded plainly and by all of runtime/ as the SGLang worker drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.planning.round_step import RoundBudget
from sglang_kvspec.planning.step import StepPlan
from sglang_kvspec.pools.tiered_kv import TieredKV
from sglang_kvspec.runtime.chooser import Chooser, Verified
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.reference_attention import ReferenceAttention
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.round_stepper import RoundStepper
from sglang_kvspec.runtime.sampling import (
    SamplingParams,
    adjust_logits,
    choose_with_noise,
    distribution,
)
from sglang_kvspec.runtime.stepper import Stepper

# Encoded pages of the longest request, and what it spills into.
LARGEST_PAGES = 7
VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 200, 4, 2, 16, 2
WIDTH = HEADS * HEAD_DIM
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ToyModel:
    """Random weights, scaled so that logits hang on attention and 4-bit drafts at times err."""

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
    prompt: list[int]
    num_new: int
    params: SamplingParams = field(default_factory=lambda: SamplingParams(top_k=1))
    pages: list[int] = field(default_factory=list)
    state: RequestState | None = None
    logits: list[torch.Tensor] = field(default_factory=list)

    def take(self, verified: Verified) -> list[int]:
        """The tokens of a verification, after noting the logits they were chosen from."""
        self.logits += verified.logits[: len(verified.tokens)]
        return verified.tokens


class Output(NamedTuple):
    tokens: list[int]
    logits: torch.Tensor


def plain_decode(model: ToyModel, request: Request, dense: Callable[..., torch.Tensor]) -> Output:
    """One token at a time over a full-precision cache; greedy or seeded."""
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


class Engine:
    """Serves requests with at most `max_running` at once; freed pages are reused at once."""

    def __init__(
        self, kv: TieredKV, model: ToyModel, config: KVSpecConfig, max_running: int = 3
    ) -> None:
        self.kv, self.model, self.config, self.max_running = kv, model, config, max_running
        self.attention = ReferenceAttention(kv)
        self.keeper = PageKeeper(kv, config.recent_pages)
        self.stepper = Stepper(config, kv)
        self.chooser = Chooser(0, torch.device("cpu"))
        self.counters = SpecCounters()
        self.free_pages = list(range(kv.plan.num_pages, 0, -1))
        self.kept: set[int] = set()

    def serve(self, requests: Sequence[Request], chunk: int = 10**6) -> list[Output]:
        waiting, running = list(requests), []
        while waiting or running:
            while waiting and len(running) < self.max_running:
                running.append(waiting.pop(0))
                self._prefill(running[-1], chunk, len(running))
            self._iterate(running)
            for request in [r for r in running if r.state.remaining == 0]:
                running.remove(request)
                self._release(request)
            self.kv.check_integrity()
        return [Output(r.state.output, torch.stack(r.logits)) for r in requests]

    def _prefill(self, request: Request, chunk: int, num_running: int) -> None:
        """Pages the request brings hold the start of its prompt already."""
        size = self.kv.geometry.page_size
        self.kept.update(request.pages)
        start = len(request.pages) * size
        while start < len(request.prompt):
            length = min(chunk, len(request.prompt) - start)
            pages = self._pages(request, start + length)
            recent = self.config.recent_pages
            row = prefill_row(start, length, pages, page_size=size, recent_pages=recent)
            logits = self._forward([row], request.prompt[start : row.end])
            self.keeper.commit(row.pages, row.start, row.end)
            start = row.end
        (first,) = request.take(self.chooser.first(logits[-1:], request.params, (), start, None))
        request.state = RequestState(
            rid="",
            committed_len=start,
            pending=first,
            output=[first],
            params=request.params,
            remaining=request.num_new - 1,
        )

    def _iterate(self, running: list[Request]) -> None:
        states = [r.state for r in running]
        pages = [self._pages(r, r.state.committed_len) for r in running]
        plan = self.stepper.plan(states, pages)
        rows = {i: self._row(plan, i, r) for i, r in enumerate(running) if i not in plan.wait}
        tokens = []
        for i, row in rows.items():
            s = states[i]
            tokens += [s.last_token] if row.kind is RowKind.DRAFT else [s.pending, *s.drafts]
        logits = self._forward(list(rows.values()), tokens) if rows else torch.empty(0)
        spans = logits.split([row.length for row in rows.values()])
        for (i, row), part in zip(rows.items(), spans, strict=True):
            if row.kind is RowKind.DRAFT:
                self.chooser.draft(states[i], part, None)
            else:
                self._verify(running[i], row, part)
        self.counters.observe_step(plan)

    def _verify(self, request: Request, row: Row, logits: torch.Tensor) -> None:
        state = request.state
        num_drafts, before = len(state.drafts), state.committed_len
        emitted = request.take(self.chooser.verify(state, logits, None))
        self.counters.observe_verification(num_drafts, len(emitted) - 1)
        assert emitted, "output differs in length: the logits allow no choice"
        state.commit(emitted)
        assert not state.drafts, "a verification left drafts behind"
        assert state.committed_len == len(request.prompt) + len(state.output) - 1
        self.keeper.commit(row.pages, before, state.committed_len)

    def _row(self, plan: StepPlan, index: int, request: Request) -> Row:
        state = request.state
        if index in plan.draft:
            pages = self._pages(request, state.next_position + 1)
            return Row(RowKind.DRAFT, state.next_position, 1, pages)
        length = len(state.drafts) + 1
        pages = self._pages(request, state.committed_len + length)
        return Row(RowKind.VERIFY, state.committed_len, length, pages)

    def _forward(self, rows: list[Row], tokens: list[int]) -> torch.Tensor:
        self.attention.begin(ForwardPlan(tuple(rows)))
        positions = [p for row in rows for p in range(row.start, row.end)]
        logits = self.model.logits(
            tokens, positions, lambda *args: self.attention.forward(*args, HEAD_DIM**-0.5)
        )
        self.attention.finish()
        return logits

    def _pages(self, request: Request, num_tokens: int) -> torch.Tensor:
        needed = -(-num_tokens // self.kv.geometry.page_size)
        while len(request.pages) < needed:
            request.pages.append(self.free_pages.pop())
        return torch.tensor(request.pages[:needed])

    def _release(self, request: Request) -> None:
        """Kept pages stay as a cached prefix, the others are free for the next request."""
        full = request.state.committed_len // self.kv.geometry.page_size
        self.keeper.retire(torch.tensor(request.pages[:full], dtype=torch.int64))
        gone = [page for page in request.pages if page not in self.kept]
        self.kv.free_pages(gone)
        self.free_pages += gone


class RoundEngine(Engine):
    """The same in rounds, whose link moves `link_pages` while a round drafts."""

    def __init__(self, *args, link_pages: int = 2, **options) -> None:
        super().__init__(*args, **options)
        self.rounds = RoundStepper(self.kv)
        self.link_pages = link_pages
        self.num_waited = 0

    def _prefill(self, request: Request, chunk: int, num_running: int) -> None:
        super()._prefill(request, chunk, num_running)
        request.state.rid = str(id(request))

    def _iterate(self, running: list[Request]) -> None:
        states = [r.state for r in running]
        most = min(self.config.max_draft_len, 7)
        lens = [max(0, min(5, state.cap_len(most) - len(state.drafts))) for state in states]
        ends = [s.next_position + n + 1 for s, n in zip(states, lens, strict=True)]
        pages = [self._pages(r, end) for r, end in zip(running, ends, strict=True)]
        budget = RoundBudget(self.link_pages, 2 * self.link_pages)
        plan = self.rounds.plan(states, pages, lens, budget)
        for step in range(max(lens)):
            going = [i for i, n in enumerate(lens) if n > step]
            rows = [Row(RowKind.DRAFT, states[i].next_position, 1, pages[i]) for i in going]
            logits = self._forward(rows, [states[i].last_token for i in going])
            for i, part in zip(going, logits, strict=True):
                self.chooser.draft(states[i], part[None], None)
        self.rounds.await_fetches(plan, pages)
        before = self.kv.residuals.bytes_streamed
        self.num_waited += len(running) - len(plan.verify)
        rows = [
            Row(RowKind.VERIFY, states[i].committed_len, len(states[i].drafts) + 1, pages[i])
            for i in plan.verify
        ]
        tokens = [t for i in plan.verify for t in (states[i].pending, *states[i].drafts)]
        if not rows:
            return
        logits = self._forward(rows, tokens)
        if self.kv.plan.cache_pages >= LARGEST_PAGES:
            assert self.kv.residuals.bytes_streamed == before, "a page was not fetched as planned"
        spans = logits.split([row.length for row in rows])
        for i, row, part in zip(plan.verify, rows, spans, strict=True):
            self._verify(running[i], row, part)


def assert_same_output(served: Sequence[Output], plain: Sequence[Output]) -> None:
    """The same tokens, chosen from the same logits up to fp32 rounding."""
    for index, (got, want) in enumerate(zip(served, plain, strict=True)):
        pairs = list(zip(got.tokens, want.tokens, strict=True))
        other = [at for at, (a, b) in enumerate(pairs) if a != b]
        assert not other, f"request {index} differs in token {other[0]}"
        difference = (got.logits - want.logits).abs()
        # Forbidden tokens are at -inf, in both or the difference is infinite.
        error = difference.where(got.logits != want.logits, 0.0).amax(-1)
        # Rounding moves logits, of size 8, by less than 1e-5; eight bits in place of 32 by 1e-2.
        assert error.max() < 1e-4, f"request {index} differs in the logits of {error.argmax()}"


@pytest.fixture(scope="session")
def toy(make_kv) -> SimpleNamespace:
    """The classes of this module, one model, and a pool of its shape."""

    def kv(**options) -> TieredKV:
        options = {"num_pages": 24, "window_pages": 9, "cache_pages": 2} | options
        return make_kv(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, **options)

    return SimpleNamespace(
        Engine=Engine,
        RoundEngine=RoundEngine,
        Request=Request,
        assert_same_output=assert_same_output,
        kv=kv,
        model=ToyModel(),
        plain_decode=plain_decode,
        vocab=VOCAB,
    )
