"""Rounds of whole requests, as a server runs them: draft over anchors, verify, and begin again
behind the first rejection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from acceptance.confidence import log_odds_and_lead, write_digits
from acceptance.drafting import PageMap, TargetRun, from_pages, to_pages
from acceptance.model import Llama

# Full pages that a request keeps in full precision: the default of --kvspec-recent-pages.
RECENT_PAGES = 1


@dataclass(slots=True)
class Rounds:
    """Rounds of one request, in order. accepted: accept lengths. pages_read: shares of the full
    pages that drafts read by a view. tokens_read: shares of all tokens that drafts read by scores.
    mass: shares of the attention mass of full pages that is on the pages read. top, lead: how sure
    each draft of a round was, as confidence.py writes it, noted only where rounds begin at every
    token."""

    accepted: list[int] = field(default_factory=list)
    pages_read: list[float] = field(default_factory=list)
    tokens_read: list[float] = field(default_factory=list)
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

    def reset(self) -> None:
        """Return to the state before the first round."""
        for parts, others in zip(self.layers, self._exact, strict=True):
            for part, other in zip(parts, others, strict=True):
                part.copy_(other)
        self._num_encoded = [0] * len(self._num_encoded)

    def encode(self, row: int, num_tokens: int) -> None:
        """Encode the pages that have left the recent window of a request of num_tokens tokens."""
        begin, end = self._num_encoded[row], self.first_recent(num_tokens)
        if begin == end:
            return
        for parts, others in zip(self.layers, self._anchors, strict=True):
            for part, other in zip(parts, others, strict=True):
                part[row, :, begin:end] = other[row, :, begin:end]
        self._num_encoded[row] = end

    def first_recent(self, num_tokens: int) -> int:
        """Return the first token of the recent window of a request of num_tokens tokens."""
        return max(num_tokens // self.page_size - RECENT_PAGES, 0) * self.page_size

    def restore(self, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Replace what drafts wrote for tokens by what the target wrote. rows: requests [n];
        places: tokens of each [n, number of drafts]."""
        where = (rows[:, None], slice(None), places)
        for parts, others in zip(self.layers, self._exact, strict=True):
            for part, other in zip(parts, others, strict=True):
                part[where] = other[where]


class Reads(Protocol):
    """Rule that tells which tokens the drafts of each round read."""

    def visible(self, at: torch.Tensor, going: torch.Tensor, found: list[Rounds]) -> torch.Tensor:
        """Return which tokens of the cache drafts may see, bool [num_layers, batch, num_kv_heads,
        tokens], at least one for each head. The caller masks tokens that are yet to come.

        at: index of each request's pending token among the tokens of the run [batch]. going:
        requests that draft [batch] bool. Notes in `found` what they read.
        """

    def verified(self, row: int, first: int, count: int) -> None:
        """Note that the tokens first .. first + count - 1 of a request's run were verified."""


@torch.inference_mode()
def run_rounds(
    model: Llama,
    run: TargetRun,
    caches: DraftCaches,
    reads: Reads,
    draft_len: int,
) -> list[Rounds]:
    """Take every request of a target run through rounds of draft_len drafts, as long as its tokens
    last. Return the rounds by request. Overwrites `caches`.

    The target's own greedy tokens are the verification: a draft is kept where it is the same token.
    """
    found = [Rounds() for _ in run.tokens]
    # Index of the pending token of each request among the tokens of the run.
    at = torch.zeros(len(found), dtype=torch.int64, device=run.tokens.device)
    while bool((going := at + draft_len <= run.steps).any()):
        rows = going.nonzero().flatten()
        begins = dict(zip(rows.tolist(), at[rows].tolist(), strict=True))
        for row, first in begins.items():
            caches.encode(row, run.prompt_len + first)
        visible = reads.visible(at, going, found)
        accepted = _accepted(model, run, caches, rows, at[rows], draft_len, visible)
        places = run.prompt_len + at[rows, None] + torch.arange(draft_len, device=at.device)
        caches.restore(rows, places)
        at[rows] += accepted + 1
        for row, length in zip(begins, accepted.tolist(), strict=True):
            found[row].accepted.append(length)
            reads.verified(row, begins[row], length + 1)
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


def _accepted(
    model: Llama,
    run: TargetRun,
    caches: DraftCaches,
    rows: torch.Tensor,
    at: torch.Tensor,
    draft_len: int,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Return how many drafts of the requests `rows` [n] agree with the target [n]. at: index of
    each one's pending token [n]. visible: [num_layers, batch, num_kv_heads, tokens].

    Up to the first draft that the target rejects, drafts are the target's tokens. So one forward
    over these gives every draft that counts.
    """
    steps = at[:, None] + torch.arange(draft_len, device=at.device)
    tokens = run.tokens[rows[:, None], steps]
    begins = run.prompt_len + at
    drafts = model.decode_masked(tokens, begins, rows, caches.layers, visible).argmax(-1)
    agrees = drafts == run.tokens[rows[:, None], steps + 1]
    return agrees.int().cumprod(1).sum(1)
