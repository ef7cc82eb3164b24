"""Scores of the tokens of prompts, and rounds of drafts that read the best of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from acceptance.drafting import TargetRun
from acceptance.model import Llama, Prefilled
from acceptance.rounds import DraftCaches, Rounds
from sglang_kvspec.engine.prompt_repeats import PIECE, pieces
from sglang_kvspec.scorers.base import Allocation, LayerChunk, Scorer
from sglang_kvspec.scorers.checks import wrong_scores
from sglang_kvspec.scorers.selection import kept_tokens

# Tokens of a prompt that a scorer is shown at once.
CHUNK = 2048
Memory = list[dict[str, torch.Tensor]]


@dataclass(slots=True)
class PromptScores:
    """Scores of one prompt. scores: [num_layers, num_kv_heads, prompt_len] float32. memory: what
    the scorer notes, by layer."""

    scores: torch.Tensor
    memory: Memory


class PromptScorer:
    """Shows scorers the layers of one prompt's forwards. One forward serves all of them."""

    def __init__(self, model: Llama, scorers: Mapping[str, Scorer], chunk: int = CHUNK) -> None:
        self._model, self._scorers, self._chunk = model, scorers, chunk
        num_layers = model.shape.num_layers
        self._scores: dict[str, list[torch.Tensor]] = {name: [] for name in scorers}
        self._memory: dict[str, Memory] = {
            name: [{} for _ in range(num_layers)] for name in scorers
        }

    def prefilled(
        self, layer: int, hidden: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Score the prompt's tokens, in chunks. Arguments are those of model.Observer."""
        queries, keys, values = (_by_token(part) for part in (q, k, v))
        for name, scorer in self._scorers.items():
            scores = keys.new_zeros((keys.shape[1], 0))
            for start in range(0, len(queries), self._chunk):
                end = min(start + self._chunk, len(queries))
                chunk = LayerChunk(
                    layer=layer,
                    first_kv_head=0,
                    start=start,
                    prompt_len=end,
                    queries=queries[start:end],
                    scale=q.shape[-1] ** -0.5,
                    keys=keys[:end],
                    values=values[:end],
                    scores=scores,
                    memory=self._memory[name][layer],
                )
                scores = self._ask(scorer, chunk, hidden[0, start:end])
            self._scores[name].append(scores)

    def repeated(
        self, layer: int, hidden: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Score the prompt's tokens anew by a part of the prompt that is read a second time, behind
        the prompt. Arguments are those of model.Observer."""
        queries, keys, values = (_by_token(part) for part in (q, k, v))
        prompt_len = len(keys) - len(queries)
        for name, scorer in self._scorers.items():
            if not scorer.needs.repeats:
                continue
            chunk = LayerChunk(
                layer=layer,
                first_kv_head=0,
                start=prompt_len,
                prompt_len=prompt_len,
                queries=queries,
                scale=q.shape[-1] ** -0.5,
                keys=keys,
                values=values,
                scores=self._scores[name][layer],
                memory=self._memory[name][layer],
            )
            scores = self._ask(scorer, chunk, hidden[0])
            self._scores[name][layer] = scores[:, :prompt_len]

    def result(self) -> dict[str, PromptScores]:
        """Return the scores by the name of the scorer."""
        return {
            name: PromptScores(torch.stack(self._scores[name]), self._memory[name])
            for name in self._scorers
        }

    def _ask(self, scorer: Scorer, chunk: LayerChunk, hidden: torch.Tensor) -> torch.Tensor:
        chunk.hidden = hidden if scorer.needs.hidden else None
        chunk.rotary = self._model if scorer.needs.rotary else None
        return checked_scores(scorer, chunk)


def checked_scores(scorer: Scorer, chunk: LayerChunk) -> torch.Tensor:
    """Return a scorer's scores of a chunk. Raises ValueError for a wrong shape, and for NaN."""
    scores = scorer.score(chunk)
    if problem := wrong_scores(scorer, scores, chunk):
        raise ValueError(problem)
    return scores.float()


def score_prompts(
    model: Llama, prompts: torch.Tensor, scorers: Mapping[str, Scorer]
) -> dict[str, list[PromptScores]]:
    """Return the scores of prompts [batch, T] int64 by the name of the scorer."""
    return prefill_and_score(model, prompts, scorers, spare=0)[1]


@torch.inference_mode()
def prefill_and_score(
    model: Llama, prompts: torch.Tensor, scorers: Mapping[str, Scorer], spare: int
) -> tuple[list[Prefilled], dict[str, list[PromptScores]]]:
    """Run prompts [batch, T] int64 one by one, and again behind themselves if a scorer asks for
    that. Return what Llama.prefill() gives of each, with room for `spare` more tokens, and their
    scores by the name of the scorer."""
    parts: list[Prefilled] = []
    found: dict[str, list[PromptScores]] = {name: [] for name in scorers}
    repeats = any(scorer.needs.repeats for scorer in scorers.values())
    for prompt in prompts.to(model.device).split(1):
        scoring = PromptScorer(model, scorers)
        parts.append(model.prefill(prompt, spare, observe=scoring.prefilled))
        if repeats:
            num_tokens = prompt.shape[1]
            past = [tuple(part[:, :, :num_tokens] for part in layer) for layer in parts[-1][0]]
            # As a server does it, but for prompts of any length.
            for piece in pieces(prompt[0].tolist(), PIECE):
                again = torch.tensor([piece], device=prompt.device)
                model.repeat(again, past, scoring.repeated)  # type: ignore[arg-type]
        for name, scores in scoring.result().items():
            found[name].append(scores)
    return parts, found


class Kept(NamedTuple):
    """Arguments of kept_tokens() beside scores."""

    budget: float
    allocation: Allocation
    unit: int


class AllReads:
    """rounds.Reads of every token."""

    def __init__(self, model: Llama, run: TargetRun) -> None:
        shape, num_tokens = model.shape, run.cache[0][0].shape[2]
        size = (shape.num_layers, len(run.tokens), shape.num_kv_heads, num_tokens)
        self._masks = torch.ones(size, dtype=torch.bool, device=run.tokens.device)

    def visible(self, at: torch.Tensor, going: torch.Tensor, found: list[Rounds]) -> torch.Tensor:
        for row in going.nonzero().flatten().tolist():
            found[row].tokens_read.append(1.0)
        return self._masks

    def verified(self, row: int, first: int, count: int) -> None:
        """Nothing to note."""


class ScoredReads:
    """rounds.Reads by scores: the best tokens of the prompt, the recent window, and all tokens that
    the request has generated."""

    def __init__(
        self,
        model: Llama,
        run: TargetRun,
        caches: DraftCaches,
        scorer: Scorer,
        scored: list[PromptScores],
        kept: Kept,
    ) -> None:
        """scored: of each request of the run; not changed. kept: what drafts read of prompts, which
        have whole units."""
        self._run, self._caches, self._scorer = run, caches, scorer
        self._rotary = model if scorer.needs.rotary else None
        self._rule = kept
        self._scores = [each.scores for each in scored]
        # Scorers replace tensors and do not change them.
        self._memory = [[dict(noted) for noted in each.memory] for each in scored]
        # [num_layers, batch, num_kv_heads, tokens]
        self._kept = torch.stack([self._kept_of(row) for row in range(len(scored))], dim=1)

    def visible(self, at: torch.Tensor, going: torch.Tensor, found: list[Rounds]) -> torch.Tensor:
        committed = self._run.prompt_len + at
        recent = [self._caches.first_recent(num_tokens) for num_tokens in committed.tolist()]
        places = torch.arange(self._kept.shape[-1], device=at.device)
        in_window = places >= torch.tensor(recent, device=at.device)[:, None]
        masks = self._kept | in_window[:, None]
        counted = masks & (places < committed[:, None])[:, None]
        shares = counted.sum(-1).double().mean((0, 2)) / committed
        for row in going.nonzero().flatten().tolist():
            found[row].tokens_read.append(float(shares[row]))
        return masks

    def verified(self, row: int, first: int, count: int) -> None:
        if not self._scorer.needs.drafting:
            return
        start = self._run.prompt_len + first
        end, by_layer = start + count, []
        parts = zip(self._run.cache, self._run.queries, strict=True)
        for layer, ((k, v), queries) in enumerate(parts):
            chunk = LayerChunk(
                layer=layer,
                first_kv_head=0,
                start=start,
                prompt_len=self._run.prompt_len,
                queries=queries[row, :, first : first + count].transpose(0, 1),
                scale=k.shape[-1] ** -0.5,
                keys=k[row, :, :end].transpose(0, 1),
                values=v[row, :, :end].transpose(0, 1),
                scores=self._scores[row][layer],
                memory=self._memory[row][layer],
                rotary=self._rotary,
            )
            by_layer.append(checked_scores(self._scorer, chunk))
        self._scores[row] = torch.stack(by_layer)
        self._kept[:, row] = self._kept_of(row)

    def _kept_of(self, row: int) -> torch.Tensor:
        """Return which tokens of the cache a request's drafts read by its scores, bool [num_layers,
        num_kv_heads, tokens]."""
        of_prompt = self._scores[row][..., : self._run.prompt_len]
        kept = kept_tokens(of_prompt, *self._rule)
        generated = self._run.cache[0][0].shape[2] - self._run.prompt_len
        return F.pad(kept, (0, generated), value=True)


def _by_token(part: torch.Tensor) -> torch.Tensor:
    """Return [1, heads, n, head_dim] as [n, heads, head_dim], contiguous."""
    return part[0].transpose(0, 1).contiguous()
