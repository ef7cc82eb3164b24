"""Rounds of whole requests, as a server runs them: draft over anchors, verify, and begin again
behind the first rejection."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from acceptance.confidence import log_odds_and_lead, write_digits
from acceptance.drafting import PageMap, TargetRun, from_pages, to_pages
from acceptance.model import Llama
from kvspec_kernels.reference.page_selection import page_mass
from sglang_kvspec.runtime.draft_view import DraftView
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

# Full pages that a request keeps in full precision: the default of --kvspec-recent-pages.
RECENT_PAGES = 1
# Verified queries whose mass on the pages read is noted, for every view.
MASS_QUERIES = 8


@dataclass(slots=True)
class Rounds:
    """Rounds of one request, in order. accepted: accept lengths. pages_read: shares of the full
    pages that drafts read. mass: shares of the attention mass of full pages that is on the pages
    read. top, lead: how sure each draft of a round was, as confidence.py writes it, noted only
    where rounds begin at every token."""

    accepted: list[int] = field(default_factory=list)
    pages_read: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    top: list[str] = field(default_factory=list)
    lead: list[str] = field(default_factory=list)


class DraftCaches:
    """Keys and values of a batch as drafts read them: anchors, and behind them the recent window
    in full precision."""

    def __init__(self, run: TargetRun, page_map: PageMap, page_size: int) -> None:
        self.page_size = page_size
        self.layers = [(k.clone(), v.clone()) for k, v in run.cache]
        self._exact = run.cache
        num_encoded = (run.prompt_len + run.steps) // page_size * page_size
        self._anchors = []
        for k, v in run.cache:
            pages = [to_pages(part[:, :, :num_encoded], page_size) for part in (k, v)]
            self._anchors.append([from_pages(part, len(k)) for part in page_map(*pages)])
        self._num_encoded = [0] * len(run.tokens)

    def encode(self, row: int, num_tokens: int) -> None:
        """Encode the pages that have left the recent window of a request of num_tokens tokens."""
        end = max(num_tokens // self.page_size - RECENT_PAGES, 0) * self.page_size
        self._copy(self._anchors, row, self._num_encoded[row], end)
        self._num_encoded[row] = end

    def restore(self, row: int, begin: int, end: int) -> None:
        """Replace what drafts wrote for tokens begin .. end - 1 by what the target wrote."""
        self._copy(self._exact, row, begin, end)

    def _copy(self, source: list, row: int, begin: int, end: int) -> None:
        for parts, others in zip(self.layers, source, strict=True):
            for part, other in zip(parts, others, strict=True):
                part[row, :, begin:end] = other[row, :, begin:end]


@torch.inference_mode()
def run_rounds(
    model: Llama,
    run: TargetRun,
    caches: DraftCaches,
    view: DraftView,
    budget: float,
    draft_len: int,
) -> list[Rounds]:
    """Take every request of a target run through rounds of draft_len drafts, as long as its tokens
    last. Return the rounds by request. Overwrites `caches`. budget: share of the pages that a view
    with budgets reads.

    The target's own greedy tokens are the verification: a draft is kept where it is the same token.
    """
    found = [Rounds() for _ in run.tokens]
    # Index of the pending token of each request among the tokens of the run.
    at = torch.zeros(len(found), dtype=torch.int64, device=run.tokens.device)
    while bool((going := at + draft_len <= run.steps).any()):
        visible = _visible(model, run, caches, view, budget, at, going, found)
        drafts = _draft(model, run, caches, at.clamp_max(run.steps - draft_len), draft_len, visible)
        places = (at[:, None] + 1 + torch.arange(draft_len, device=at.device)).clamp_max(run.steps)
        agrees = drafts == run.tokens.gather(1, places)
        accepted = agrees.int().cumprod(1).sum(1)
        for row in going.nonzero().flatten().tolist():
            found[row].accepted.append(int(accepted[row]))
            first = run.prompt_len + int(at[row])
            caches.restore(row, first, first + draft_len)
        at += torch.where(going, accepted + 1, 0)
    return found


@torch.inference_mode()
def run_rounds_at_every_token(
    model: Llama, run: TargetRun, caches: DraftCaches, draft_len: int
) -> list[Rounds]:
    """Draft behind every token of a target run, over all anchors. Return the rounds by request, and
    how sure each draft was. Overwrites `caches`.

    Rounds that begin in the same page read the same anchors, so they draft together.
    """
    found = [Rounds() for _ in run.tokens]
    size, last = caches.page_size, run.steps - draft_len
    for row, rounds in enumerate(found):
        first = 0
        while first <= last:
            committed = run.prompt_len + first
            end = min(first + size - committed % size, last + 1)
            caches.encode(row, committed)
            at = torch.arange(first, end, device=run.tokens.device)
            drafts, confidence = _draft_together(model, run, caches, row, at, draft_len)
            places = at[:, None] + 1 + torch.arange(draft_len, device=at.device)
            accepted = (drafts == run.tokens[row][places]).int().cumprod(1).sum(1)
            rounds.accepted += accepted.tolist()
            rounds.top += map(write_digits, confidence[:, :, 0].tolist())
            rounds.lead += map(write_digits, confidence[:, :, 1].tolist())
            first = end
        rounds.pages_read = rounds.mass = [1.0] * len(rounds.accepted)
    return found


def _draft_together(
    model: Llama, run: TargetRun, caches: DraftCaches, row: int, at: torch.Tensor, draft_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drafts [rounds, draft_len] of a request behind its tokens `at`, and how sure each
    was [rounds, draft_len, 2]."""
    past = [(k[row], v[row]) for k, v in caches.layers]
    size = (len(at), model.shape.num_kv_heads, draft_len, model.shape.head_dim)
    own = [(torch.zeros(size, device=at.device), torch.zeros(size, device=at.device)) for _ in past]
    token, drafts, confidence = run.tokens[row][at], [], []
    for step in range(draft_len):
        logits = model.decode_behind(token, run.prompt_len + at, step, past, own)
        token = logits.argmax(-1)
        drafts.append(token)
        confidence.append(log_odds_and_lead(logits))
    return torch.stack(drafts, dim=1), torch.stack(confidence, dim=1)


def _visible(
    model: Llama,
    run: TargetRun,
    caches: DraftCaches,
    view: DraftView,
    budget: float,
    at: torch.Tensor,
    going: torch.Tensor,
    found: list[Rounds],
) -> list[torch.Tensor]:
    """Return which tokens the drafts of a round may see, as decode_masked() takes it, and note in
    `found` what they read. Encodes pages."""
    shape, size = model.shape, caches.page_size
    num_tokens = run.cache[0][0].shape[2]
    masks = torch.ones(
        (shape.num_layers, len(found), shape.num_kv_heads, num_tokens),
        dtype=torch.bool,
        device=at.device,
    )
    for row in going.nonzero().flatten().tolist():
        committed = run.prompt_len + int(at[row])
        caches.encode(row, committed)
        num_pages = committed // size
        state = RequestState("", committed, 0, [], SamplingParams(), 1, budget=budget)
        if view.num_queries:
            state.page_mass = _mass(run, caches, row, committed, view.num_queries)
            state.num_scored = state.page_mass.shape[-1]
        seen = view.select(state, num_pages)
        if seen is None:
            found[row].pages_read.append(1.0)
            found[row].mass.append(1.0)
            continue
        mass = _mass(run, caches, row, committed, MASS_QUERIES)
        lists = seen.to(at.device).expand(shape.num_layers, shape.num_kv_heads, -1)
        read = torch.zeros((*mass.shape[:-1], num_pages), dtype=torch.bool, device=at.device)
        read.scatter_(-1, lists, True)
        found[row].pages_read.append(float(read.float().mean()))
        covered = mass * read[..., : mass.shape[-1]]
        found[row].mass.append(float(covered.sum() / mass.sum()))
        masks[:, row, :, : num_pages * size] = read.repeat_interleave(size, -1)
    return list(masks)


def _mass(
    run: TargetRun, caches: DraftCaches, row: int, committed: int, num_queries: int
) -> torch.Tensor:
    """Return page_mass of the last num_queries verified tokens on the pages before them,
    [num_layers, num_kv_heads, num_pages]."""
    num_pages = (committed - num_queries) // caches.page_size
    begin, by_layer = committed - num_queries, []
    for before, after, (k, _) in zip(run.prompt_queries, run.queries, caches.layers, strict=True):
        all_queries = torch.cat((before[row], after[row]), dim=1)
        first = begin - run.prompt_len + before.shape[2]
        q = all_queries[:, first : first + num_queries].transpose(0, 1)
        keys = k[row, :, : num_pages * caches.page_size].transpose(0, 1)
        by_layer.append(page_mass(q, keys, caches.page_size, k.shape[-1] ** -0.5))
    return torch.stack(by_layer)


def _draft(
    model: Llama,
    run: TargetRun,
    caches: DraftCaches,
    at: torch.Tensor,
    draft_len: int,
    visible: list[torch.Tensor],
) -> torch.Tensor:
    """Return the drafts [batch, draft_len] behind the pending tokens."""
    places = torch.arange(run.cache[0][0].shape[2], device=at.device)
    token = run.tokens.gather(1, at[:, None])[:, 0]
    drafts = []
    for step in range(draft_len):
        positions = run.prompt_len + at + step
        past = (places <= positions[:, None])[:, None]
        logits = model.decode_masked(
            token, positions, caches.layers, [mask & past for mask in visible]
        )
        token = logits.argmax(-1)
        drafts.append(token)
    return torch.stack(drafts, dim=1)
