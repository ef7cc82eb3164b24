"""Scores of the tokens of requests, made by a scorer in forwards of a CPU server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F

from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.kv.reference_cache import KV, ReferenceKVCache
from sglang_kvspec.runtime.phase_timer import TotalTimer
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.token_scores import TokenScores
from sglang_kvspec.scorers.base import ALWAYS, LayerChunk, Rotary, Scorer

# Tokens of a trial at the start.
TRIED_TOKENS = 8
Memory = list[dict[str, torch.Tensor]]


class TokenScorer:
    """The engine's PageScorer, and the observer of forwards, for a view by scores of tokens.

    Scores of prompts are kept by page. So a prompt may come in several chunks, a cached prefix
    keeps the scores of the request that computed it, and a freed page takes its scores along.
    """

    def __init__(
        self, kv: ReferenceKVCache, scorer: Scorer, rotary: Rotary | None, first_kv_head: int
    ) -> None:
        """rotary: of the model; None unless the scorer needs it. first_kv_head: number of the
        rank's first KV head among all of the model."""
        self._kv, self._scorer, self._rotary = kv, scorer, rotary
        self._first_kv_head = first_kv_head
        self._timer = TotalTimer(kv.device)
        # [num_layers, num_kv_heads, page_size] by page; ALWAYS for tokens without a score.
        self._scores: dict[int, torch.Tensor] = {}
        # The scorer's memory after a prefill, by the page of its last token.
        self._memory: dict[int, Memory] = {}
        self._rows: Sequence[Row] = ()
        self._scored: dict[int, list[torch.Tensor]] = {}
        self._noted: dict[int, Memory] = {}
        self._before: dict[int, torch.Tensor] = {}
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
            return torch.randn(shape, generator=rng).to(geometry.dtype)

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
                scores=torch.empty(geometry.num_kv_heads, 0),
                memory={},
                hidden=random(TRIED_TOKENS, hidden_size) if self._scorer.needs.hidden else None,
                rotary=self._rotary,
            )
            self._ask(chunk)

    # Observer of forwards

    def begin(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._scored, self._noted, self._before, self._queries = {}, {}, {}, {}
        for index, row in enumerate(rows):
            if row.kind in (RowKind.PREFILL, RowKind.REPEAT):
                self._scored[index] = []
                self._before[index] = self._scores_of(row.pages, row.start)
                self._noted[index] = self._memory_before(row)
            elif row.kind is RowKind.VERIFY and self._scorer.needs.drafting:
                self._queries[index] = []

    def observe(self, layer: int, index: int, q: torch.Tensor, context: KV, scale: float) -> None:
        if index in self._queries:
            self._queries[index].append((q, scale))
        if index not in self._scored:
            return
        row = self._rows[index]
        is_repeat = row.kind is RowKind.REPEAT
        chunk = LayerChunk(
            layer=layer,
            first_kv_head=self._first_kv_head,
            start=row.start,
            prompt_len=row.start if is_repeat else row.end,
            queries=q,
            scale=scale,
            keys=context[0],
            values=context[1],
            scores=self._before[index][layer],
            memory=self._noted[index][layer],
            hidden=self._hidden_of(layer, index),
            rotary=self._rotary,
        )
        scores = self._ask(chunk)
        self._scored[index].append(scores[:, : chunk.prompt_len])

    def end(self) -> None:
        """Keep the scores of all prompts of the forward, by page."""
        for index, by_layer in self._scored.items():
            row = self._rows[index]
            self._keep(row.pages, torch.stack(by_layer))
            num_scored = row.start if row.kind is RowKind.REPEAT else row.end
            last_page = int(row.pages[(num_scored - 1) // self._page_size])
            self._memory[last_page] = self._noted[index]
        self._scored, self._noted, self._before = {}, {}, {}

    def on_pages_freed(self, pages: Iterable[int]) -> None:
        """Forget what is known of pages that SGLang freed."""
        for page in pages:
            self._scores.pop(page, None)
            self._memory.pop(page, None)

    # The engine's PageScorer

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        """Give new requests the scores of their prompts, and score tokens anew where the scorer
        asks for verified ones. See PageScorer."""
        for index, state, pages in committed:
            known = state.token_scores
            if known is None:
                scores = self._scores_of(pages, state.committed_len)
                last_page = int(pages[(state.committed_len - 1) // self._page_size])
                state.token_scores = TokenScores(scores, self._memory_at(last_page))
            elif index in self._queries:
                self._update(known, self._rows[index], self._queries[index], state, pages)

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
                scores=before[layer][:, : row.start],
                memory=memory[layer],
                rotary=self._rotary,
            )
            by_layer.append(self._ask(chunk))
        state.token_scores = TokenScores(torch.stack(by_layer), memory)

    # Parts

    @property
    def _page_size(self) -> int:
        return self._kv.geometry.page_size

    def _ask(self, chunk: LayerChunk) -> torch.Tensor:
        with self._timer:
            scores = self._scorer.score(chunk)
        wanted = (chunk.keys.shape[1], chunk.end)
        if tuple(scores.shape) != wanted or bool(scores.isnan().any()):
            raise UnsupportedError(
                f"the scorer {type(self._scorer).__name__} must return {list(wanted)} scores "
                f"without NaN, got {list(scores.shape)}"
            )
        return scores.float()

    def _hidden_of(self, layer: int, index: int) -> torch.Tensor | None:
        if not self._scorer.needs.hidden:
            return None
        first = sum(row.length for row in self._rows[:index])
        return self._hidden[layer][first : first + self._rows[index].length]

    def _context(self, layer: int, pages: torch.Tensor, num_tokens: int) -> KV:
        """Return (k, v) of a request's first tokens, [num_tokens, num_kv_heads, head_dim]."""
        num_full, filled = divmod(num_tokens, self._page_size)
        k, v = (part.flatten(0, 1) for part in self._kv.read_target(layer, pages[:num_full]))
        if not filled:
            return k, v
        tail = self._kv.window.read(layer, pages[num_full : num_full + 1])
        return torch.cat((k, tail[0][0, :filled])), torch.cat((v, tail[1][0, :filled]))

    def _scores_of(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the scores [num_layers, num_kv_heads, num_tokens] of a request's first tokens."""
        geometry = self._kv.geometry
        shape = (geometry.num_layers, geometry.num_kv_heads, self._page_size)
        unknown = torch.full(shape, ALWAYS)
        num_pages = -(-num_tokens // self._page_size)
        by_page = [self._scores.get(page, unknown) for page in pages[:num_pages].tolist()]
        if not by_page:
            return unknown[..., :0]
        return torch.cat(by_page, dim=-1)[..., :num_tokens]

    def _keep(self, pages: torch.Tensor, scores: torch.Tensor) -> None:
        size = self._page_size
        num_pages = -(-scores.shape[-1] // size)
        padded = F.pad(scores, (0, num_pages * size - scores.shape[-1]), value=ALWAYS)
        for place, page in enumerate(pages[:num_pages].tolist()):
            self._scores[page] = padded[..., place * size : (place + 1) * size].clone()

    def _memory_before(self, row: Row) -> Memory:
        if not row.start:
            return self._memory_at(None)
        return self._memory_at(int(row.pages[(row.start - 1) // self._page_size]))

    def _memory_at(self, page: int | None) -> Memory:
        """Return a copy of the memory noted at a page, empty where none is."""
        empty: Memory = [{} for _ in range(self._kv.geometry.num_layers)]
        noted = empty if page is None else self._memory.get(page, empty)
        # Scorers replace tensors and do not change them, so that requests may share a prefix.
        return [dict(by_name) for by_name in noted]
