"""Scores of the tokens of requests, made by a scorer in forwards at the target precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F

from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.reference_cache import KV, ReferenceKVCache
from sglang_kvspec.runtime.phase_timer import TotalTimer
from sglang_kvspec.runtime.prompt_scores import PromptScores, ScoredPrompt
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.token_scores import TokenScores
from sglang_kvspec.scorers.base import ALWAYS, LayerChunk, Rotary, Scorer
from sglang_kvspec.scorers.checks import wrong_scores

logger = logging.getLogger(__name__)

# Tokens of a trial at the start: more than any window has.
TRIED_TOKENS = 512


class TokenScorer:
    """The engine's PageScorer, and the observer of forwards, for a view by scores of tokens.

    Scores are made on the cache's device and kept on the CPU, where pages are selected.
    """

    def __init__(
        self,
        kv: ReferenceKVCache | GpuKVCache,
        scorer: Scorer,
        rotary: Rotary | None,
        first_kv_head: int,
        *,
        frees_anchors: bool = False,
    ) -> None:
        """kv: a GPU's takes no scorer that needs drafting, and needs the target `exact` for one
        that needs repeats. rotary: of the model; None unless the scorer needs it. first_kv_head:
        number of the rank's first KV head among all of the model. frees_anchors: free those of
        pages that drafts do not read; all heads must read the same pages."""
        self._kv, self._scorer, self._rotary = kv, scorer, rotary
        self._frees_anchors = frees_anchors
        self._first_kv_head = first_kv_head
        self._timer = TotalTimer(kv.device)
        self._has_warned = False
        self._prompts = PromptScores(kv.geometry, by_page=scorer.needs.earlier)
        self._rows: Sequence[Row] = ()
        # Present forward, by index of the row.
        self._before: dict[int, ScoredPrompt] = {}
        self._scored: dict[int, list[torch.Tensor]] = {}
        self._queries: dict[int, list[tuple[torch.Tensor, float]]] = {}
        self._hidden: Mapping[int, torch.Tensor] = {}

    @property
    def needs_repeats(self) -> bool:
        """Return True if prompts must run a second time, as REPEAT rows."""
        return self._scorer.needs.repeats

    @property
    def selection_s(self) -> float:
        return self._timer.seconds

    def show_hidden(self, hidden: Mapping[int, torch.Tensor]) -> None:
        """Take inputs of attention layers from a mapping that is filled before each layer attends:
        [num_tokens, hidden_size] of the whole forward, by layer."""
        self._hidden = hidden

    def try_out(self, num_heads: int, hidden_size: int) -> None:
        """Score a few random tokens in every layer, so that a scorer which does not fit the model
        stops the start. num_heads: query heads of this rank. Raises what the scorer raises, and
        UnsupportedError for scores of another form."""
        geometry = self._kv.geometry
        rng = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng).to(self._kv.device, geometry.dtype)

        for layer in range(geometry.num_layers):
            keys = random(2, TRIED_TOKENS, geometry.num_kv_heads, geometry.head_dim)
            chunk = LayerChunk(
                layer=layer,
                first_kv_head=self._first_kv_head,
                start=0,
                prompt_len=TRIED_TOKENS,
                queries=random(TRIED_TOKENS, num_heads, geometry.head_dim),
                scale=geometry.head_dim**-0.5,
                keys=keys[0],
                values=keys[1],
                scores=torch.empty(geometry.num_kv_heads, 0, device=self._kv.device),
                memory={},
                hidden=random(TRIED_TOKENS, hidden_size) if self._scorer.needs.hidden else None,
                rotary=self._rotary,
            )
            self._asked(chunk)

    # Observer of forwards

    def begin(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._scored, self._before, self._queries = {}, {}, {}
        for index, row in enumerate(rows):
            if row.kind in (RowKind.PREFILL, RowKind.REPEAT):
                self._scored[index] = []
                self._before[index] = self._prompts.take(row.pages, row.start)
            elif row.kind is RowKind.VERIFY and self._scorer.needs.drafting:
                self._queries[index] = []
        if any(row.kind is RowKind.PREFILL for row in rows):
            self._prompts.begin_prefill()

    def observe(
        self, layer: int, index: int, q: torch.Tensor, context: Callable[[], KV], scale: float
    ) -> None:
        if index in self._queries:
            self._queries[index].append((q, scale))
        if index not in self._scored:
            return
        row, before = self._rows[index], self._before[index]
        is_repeat = row.kind is RowKind.REPEAT
        known, memory = before.scores[layer], before.memory[layer]
        try:
            keys, values = context()
        except torch.OutOfMemoryError as error:
            self._warn_of(error)
            scores = _unscored(known.to(q.device), len(q), memory)
        else:
            scores = self._ask(
                LayerChunk(
                    layer=layer,
                    first_kv_head=self._first_kv_head,
                    start=row.start,
                    prompt_len=row.start if is_repeat else row.end,
                    queries=q,
                    scale=scale,
                    keys=keys,
                    values=values,
                    scores=self._earlier(known, q.device),
                    memory=memory,
                    hidden=self._hidden_of(layer, index),
                    rotary=self._rotary,
                )
            )
        self._scored[index].append(scores[:, : row.start] if is_repeat else scores)

    def end(self) -> None:
        """Keep the scores of all prompts of the forward."""
        for index, by_layer in self._scored.items():
            scores = torch.stack(by_layer).cpu()
            self._prompts.keep(self._before[index], self._rows[index].pages, scores)
        self._scored, self._before = {}, {}
        # A server whose requests end at the prefill never asks for the seconds.
        self._timer.settle()

    def on_pages_freed(self, pages: Iterable[int]) -> None:
        """Forget what is known of pages that SGLang freed."""
        self._prompts.on_pages_freed(pages)

    # The engine's PageScorer

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        """Give new requests the scores of their prompts, and score tokens anew where the scorer
        asks for verified ones. See PageScorer."""
        for index, state, pages in committed:
            known = state.token_scores
            if known is None:
                prompt = self._prompts.take(pages, state.committed_len)
                memory = prompt.memory if self._scorer.needs.drafting else []
                state.token_scores = TokenScores(prompt.scores, memory)
                if self._frees_anchors:
                    self._free_anchors(state, state.token_scores, pages, prompt.first_own)
            elif index in self._queries:
                self._update(known, self._rows[index], self._queries[index], state, pages)

    def _free_anchors(
        self, state: RequestState, scores: TokenScores, pages: torch.Tensor, first_own: int
    ) -> None:
        """Free the anchors of pages that the request has computed and that its drafts will not
        read. Of a cached prefix, another request may read them."""
        unread = scores.unread_pages(state.budget, self._page_size)
        own = unread[unread * self._page_size >= first_own]
        self._kv.free_anchors(pages[own].tolist())

    def mass_read(self, state: RequestState) -> None:
        """Know no attention mass: scores may have any scale."""

    def _update(
        self,
        known: TokenScores,
        row: Row,
        queries: Sequence[tuple[torch.Tensor, float]],
        state: RequestState,
        pages: torch.Tensor,
    ) -> None:
        """Score the tokens of a verification that were accepted, and all before them."""
        end = state.committed_len
        by_layer = []
        # Tokens whose queries no forward has shown have no score.
        before = F.pad(known.scores, (0, max(0, row.start - known.scores.shape[-1])), value=ALWAYS)
        memory = [dict(noted) for noted in known.memory]
        for layer, (q, scale) in enumerate(queries):
            keys, values = self._context(layer, pages, end)
            chunk = LayerChunk(
                layer=layer,
                first_kv_head=self._first_kv_head,
                start=row.start,
                prompt_len=min(len(state.prompt), row.start),
                queries=q[: end - row.start],
                scale=scale,
                keys=keys,
                values=values,
                scores=self._earlier(before[layer][:, : row.start], q.device),
                memory=memory[layer],
                rotary=self._rotary,
            )
            by_layer.append(self._ask(chunk))
        state.token_scores = TokenScores(torch.stack(by_layer), memory)

    # Parts

    @property
    def _page_size(self) -> int:
        return self._kv.geometry.page_size

    def _earlier(self, scores: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return what the scorer is shown of scores of earlier tokens."""
        if self._scorer.needs.earlier:
            return scores.to(device)
        return torch.full((1, 1), ALWAYS, device=device).expand(*scores.shape)

    def _ask(self, chunk: LayerChunk) -> torch.Tensor:
        """Return the scorer's scores. A scorer that fails on a chunk scores none of its tokens, so
        that drafts read them: no request may stop a server that is up."""
        try:
            return self._asked(chunk)
        except Exception as error:
            self._warn_of(error)
            return _unscored(chunk.scores, len(chunk.queries), chunk.memory)

    def _warn_of(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the scorer %s failed: %r; drafts read all tokens of the chunk, and later failures "
                "are not logged",
                type(self._scorer).__name__,
                error,
            )

    def _asked(self, chunk: LayerChunk) -> torch.Tensor:
        with self._timer:
            scores = self._scorer.score(chunk)
        if problem := wrong_scores(self._scorer, scores, chunk):
            raise UnsupportedError(problem)
        return scores.float()

    def _hidden_of(self, layer: int, index: int) -> torch.Tensor | None:
        if not self._scorer.needs.hidden:
            return None
        first = sum(row.length for row in self._rows[:index])
        return self._hidden[layer][first : first + self._rows[index].length]

    def _context(self, layer: int, pages: torch.Tensor, num_tokens: int) -> KV:
        """Return (k, v) of a request's first tokens, [num_tokens, num_kv_heads, head_dim]."""
        assert isinstance(self._kv, ReferenceKVCache)
        num_full, filled = divmod(num_tokens, self._page_size)
        k, v = (part.flatten(0, 1) for part in self._kv.read_target(layer, pages[:num_full]))
        if not filled:
            return k, v
        tail = self._kv.window.read(layer, pages[num_full : num_full + 1])
        return torch.cat((k, tail[0][0, :filled])), torch.cat((v, tail[1][0, :filled]))


def _unscored(
    known: torch.Tensor, num_tokens: int, memory: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return known scores, followed by num_tokens tokens without a score. Clears a scorer's memory,
    which lacks these tokens."""
    memory.clear()
    return F.pad(known, (0, num_tokens), value=ALWAYS)
