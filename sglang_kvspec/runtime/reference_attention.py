"""Attention over a ReferenceKVCache: the CPU backend, and the GPU backend's specification."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.kv.reference_cache import KV, ReferenceKVCache
from sglang_kvspec.runtime.layer_observer import LayerObserver
from sglang_kvspec.runtime.target_queries import TargetQueries

# Query rows of a prefill that attend at once: bounds the mask to this number times the context.
PREFILL_BLOCK = 512


class ReferenceAttention:
    """Attention that writes the KV of a planned forward and attends, layer by layer.

    Inside `with planned(plan)`, call forward(layer, ...) once for every layer in order.
    """

    def __init__(self, kv: ReferenceKVCache) -> None:
        self.kv = kv
        self._plan: ForwardPlan | None = None
        self._queries: TargetQueries | None = None
        self._observer: LayerObserver | None = None

    def keep_queries(self, most: int) -> TargetQueries:
        """Keep the queries of all later forwards, `most` of each request."""
        self._queries = TargetQueries(most)
        return self._queries

    def show(self, observer: LayerObserver) -> None:
        """Show an observer all later forwards at the target precision."""
        self._observer = observer

    @contextmanager
    def planned(self, plan: ForwardPlan) -> Iterator[None]:
        """Run a forward over the rows of a plan, layer by layer with forward(). Raises
        CapacityError if the KV cache has no room for its pages."""
        assert self._plan is None, "the previous forward has not finished"
        for watcher in (self._queries, self._observer):
            if watcher is not None:
                watcher.begin(plan.rows)
        with self.kv.forward(plan):
            self._plan = plan
            yield
        self._plan = None
        if self._observer is not None:
            self._observer.end()

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store k and v, and return the attention output [num_tokens, num_heads, head_dim].

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim].
        """
        assert self._plan is not None, "forward() was called outside of planned()"
        assert self._plan.num_tokens == len(q), (
            "the forward has another number of tokens than its plan"
        )
        out = torch.empty_like(q)
        first = 0
        for index, row in enumerate(self._plan.rows):
            span = slice(first, first + row.length)
            if self._queries is not None:
                self._queries.keep(index, q[span], scale)
            self._write(layer, row, k[span], v[span])
            out[span] = self._attend(layer, index, q[span], k[span], v[span], scale)
            first += row.length
        return out

    @property
    def _page_size(self) -> int:
        return self.kv.geometry.page_size

    # Writing

    def _write(self, layer: int, row: Row, k: torch.Tensor, v: torch.Tensor) -> None:
        if row.kind is RowKind.REPEAT:
            return
        size = self._page_size
        begin, end = (
            position * size - row.start for position in (row.direct.start, row.direct.stop)
        )
        if not row.direct:
            begin = end = row.length
        else:
            shape = (len(row.direct), size, *k.shape[1:])
            pages = row.pages[row.direct.start : row.direct.stop]
            self.kv.encode(layer, pages, k[begin:end].reshape(shape), v[begin:end].reshape(shape))
        positions = torch.arange(row.start, row.end, device=k.device)
        for part in (slice(0, begin), slice(end, row.length)):
            at = positions[part]
            if len(at):
                self.kv.window.write(layer, row.pages[at // size], at % size, k[part], v[part])

    # Reading

    def _attend(
        self,
        layer: int,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        assert self._plan is not None
        row = self._plan.rows[index]
        # All tokens from the start of the row's first page on are at hand in full precision.
        tail = self._partial_page(layer, row, (k, v))
        if row.kind is RowKind.DRAFT:
            context = self._draft_context(layer, row, tail)
            if row.mask is not None:
                return _masked(q, context, row.mask[layer], scale)
            return _causal(q, context, row, scale)
        past = _flat(self.kv.read_target(layer, row.past_pages(self._page_size)))
        if self._observer is not None:
            self._observer.observe(layer, index, q, partial(_concat, past, tail), scale)
        if self.kv.codec.target == "exact":
            return _causal(q, _concat(past, tail), row, scale)
        out = torch.empty_like(q)
        for queries, context in self._by_query_page(row, past, tail):
            begin = row.start + queries.start
            part = Row(row.kind, begin, queries.stop - queries.start, row.pages)
            out[queries] = _causal(q[queries], context, part, scale)
        return out

    def _draft_context(self, layer: int, row: Row, tail: KV) -> KV:
        """Return (k, v) [tokens, num_kv_heads, head_dim]: the full pages that a DRAFT row reads,
        followed by `tail`."""
        if row.mask is None and row.seen is not None and row.seen.ndim == 3:
            assert self.kv.anchor_places.holds_all, "lists by head are of pages with anchors"
            return _concat(self._past_by_head(layer, row.seen[layer], row), tail)
        assert row.mask is None or self.kv.anchor_places.holds_all, "a mask is of all pages"
        pages = self.kv.draftable(row.past_pages(self._page_size))
        num_past = len(pages) * self._page_size
        # Reading pages to where they are needed saves a copy of the whole context.
        k, v = (part.new_empty((num_past + len(part), *part.shape[1:])) for part in tail)
        whole_k, whole_v = (
            part[:num_past].view(len(pages), self._page_size, *part.shape[1:]) for part in (k, v)
        )
        self.kv.read_draft(layer, pages, (whole_k, whole_v))
        k[num_past:], v[num_past:] = tail
        return k, v

    def _past_by_head(self, layer: int, seen: torch.Tensor, row: Row) -> KV:
        """Return (k, v) of the full pages before a DRAFT row's first page, whose KV heads read
        pages `seen` [num_kv_heads, num_seen]."""
        # Read each page once, for all heads. place[n, h]: index in `read` of the n-th page of head
        # h.
        read, place = torch.unique(seen.T, return_inverse=True)
        heads = torch.arange(len(seen), device=seen.device)
        k, v = (
            part[place, :, heads].transpose(1, 2).flatten(0, 1)
            for part in self.kv.read_draft(layer, row.pages[read])
        )
        return k, v

    def _partial_page(self, layer: int, row: Row, new: KV) -> KV:
        """Return the tokens before the row in its first page, followed by the row's own."""
        index, filled = divmod(row.start, self._page_size)
        if filled == 0:
            return new
        old = self.kv.window.read(layer, row.pages[index : index + 1])
        return _concat((old[0][0, :filled], old[1][0, :filled]), new)

    def _by_query_page(self, row: Row, past: KV, tail: KV) -> Iterator[tuple[slice, KV]]:
        """Split an int8 row where its queries cross into the next page.

        Every full page before a query's own page reads at 8 bits, also a page that the row itself
        fills. So a token's target depends on its position alone: not on chunking, on what was
        cached, or on how many tokens are verified together.
        """
        size = self._page_size
        first_page = row.start // size
        num_full = (row.end - 1) // size - first_page
        shape = (num_full, size, *tail[0].shape[1:])
        whole_k, whole_v = (part[: num_full * size].reshape(shape) for part in tail)
        seen = _concat(past, _flat(self.kv.as_target(whole_k, whole_v))) if num_full else past
        num_past = len(past[0])
        for index in range(num_full + 1):
            page_begin = (first_page + index) * size
            begin = max(row.start, page_begin)
            end = min(row.end, page_begin + size)
            before = (part[: num_past + index * size] for part in seen)
            own = (part[index * size : end - first_page * size] for part in tail)
            yield slice(begin - row.start, end - row.start), _concat(tuple(before), tuple(own))


def _concat(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> KV:
    return torch.cat((first[0], second[0])), torch.cat((first[1], second[1]))


def _flat(pages: KV) -> KV:
    return pages[0].flatten(0, 1), pages[1].flatten(0, 1)


def _causal(q: torch.Tensor, context: KV, row: Row, scale: float) -> torch.Tensor:
    """Return attention of a row's queries [n, heads, head_dim], each over the context up to itself.

    context: (k, v) [row.end, num_kv_heads, head_dim], positions 0 .. row.end - 1. For a DRAFT row
    that does not see all pages: the pages that it sees, then its own tokens.
    """
    k, v = (part.movedim(0, 1).unsqueeze(0) for part in context)
    query = q.movedim(0, 1).unsqueeze(0)
    gqa = q.shape[1] != k.shape[1]
    out = torch.empty_like(query)
    if row.kind in (RowKind.PREFILL, RowKind.REPEAT):
        for begin in range(0, row.length, PREFILL_BLOCK):
            end = min(begin + PREFILL_BLOCK, row.length)
            num_seen = row.start + end
            last_seen = torch.arange(row.start + begin, num_seen, device=q.device)
            mask = torch.arange(num_seen, device=q.device) <= last_seen[:, None]
            out[:, :, begin:end] = scaled_dot_product_attention(
                query[:, :, begin:end],
                k[:, :, :num_seen],
                v[:, :, :num_seen],
                attn_mask=mask,
                scale=scale,
                enable_gqa=gqa,
            )
    else:
        # One call a query, of the same shape as in plain decoding. In bf16 a batched call rounds
        # differently, which can decide a near-tie for the other token.
        for index in range(row.length):
            num_seen = k.shape[2] - row.length + index + 1
            out[:, :, index : index + 1] = scaled_dot_product_attention(
                query[:, :, index : index + 1],
                k[:, :, :num_seen],
                v[:, :, :num_seen],
                scale=scale,
                enable_gqa=gqa,
            )
    return out[0].movedim(1, 0)


def _masked(q: torch.Tensor, context: KV, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return attention of a DRAFT row's queries [n, heads, head_dim] over the past tokens that
    `mask` [num_kv_heads, num_past] selects for each KV head, and over all later ones up to each
    query. context: (k, v) of all tokens, [num_tokens, num_kv_heads, head_dim]."""
    k, v = (part.movedim(0, 1).unsqueeze(0) for part in context)
    num_heads, num_tokens = q.shape[1], k.shape[2]
    last = num_tokens - len(q) + torch.arange(len(q), device=q.device)
    causal = torch.arange(num_tokens, device=q.device) <= last[:, None]
    seen = torch.ones((len(mask), num_tokens), dtype=torch.bool, device=q.device)
    seen[:, : mask.shape[1]] = mask
    by_head = seen.repeat_interleave(num_heads // len(mask), dim=0)
    out = scaled_dot_product_attention(
        q.movedim(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=by_head[:, None] & causal,
        scale=scale,
        enable_gqa=num_heads != k.shape[1],
    )
    return out[0].movedim(1, 0)
