"""Pages are scored by the queries of the last verified tokens, whatever was accepted."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.budget_views import ScoredPages
from sglang_kvspec.runtime.draft_view import ViewShape
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.target_queries import TargetQueries

SEEDED = SamplingParams(temperature=0.8, top_k=12, top_p=0.95, seed=11)


def requests(toy):
    rng = torch.Generator().manual_seed(5)
    return [
        toy.Request(torch.randint(toy.vocab, (n,), generator=rng).tolist(), new, params)
        for n, new, params in [
            (170, 40, SEEDED),
            (130, 44, SamplingParams(top_k=1)),
            (5, 90, SEEDED),
        ]
    ]


def dense_queries(toy, tokens, count):
    """Return the last `count` scaled queries of a dense forward over all tokens, by layer."""
    found = []

    def attend(layer, q, k, v):
        found.append(q[-count:] * q.shape[-1] ** -0.5)
        return toy.dense(q, k, v, 0)

    toy.model.logits(tokens, list(range(len(tokens))), attend)
    return found


class CheckedScorer:
    """Scorer that compares the queries of each scored request with those of a dense forward, and
    the mass that its drafts read with a sum page by page."""

    def __init__(self, toy, scorer, asked, view):
        self.toy, self.scorer, self.asked, self.view = toy, scorer, asked, view
        self.num_scored = self.num_selected = 0

    def compare_mass_read(self, state):
        seen = self.view.select(state, state.committed_len // self.scorer._kv.geometry.page_size)
        if seen is None:
            assert self.scorer.mass_read(state) is None
            return
        unread = [
            sum(float(value) for page, value in enumerate(mass) if page not in pages)
            for layer, heads in zip(state.page_mass, seen.tolist(), strict=True)
            for mass, pages in zip(layer, heads, strict=True)
        ]
        expected = 1 - sum(unread) / len(unread)
        assert 0 < self.scorer.mass_read(state) == pytest.approx(expected, abs=1e-5)
        self.num_selected += 1

    def score(self, committed):
        committed = list(committed)
        queries, size = self.scorer._queries, self.scorer._kv.geometry.page_size
        for index, state, _ in committed:
            (request,) = [r for r in self.asked if str(id(r)) == state.rid]
            tokens = [*request.prompt, *state.output][: state.committed_len]
            mine = queries.before(index, state.committed_len)
            assert 1 <= len(mine[0]) <= ScoredPages.num_queries
            dense = dense_queries(self.toy, tokens, len(mine[0]))
            for found, expected in zip(mine, dense, strict=True):
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            self.num_scored += 1
        self.scorer.score(committed)
        for _, state, _ in committed:
            assert state.num_scored >= (state.committed_len - ScoredPages.num_queries) // size
            if state.num_scored:
                assert state.page_mass.shape[-1] == state.num_scored
                assert (state.page_mass.sum(-1) > 0.999).all()
            self.compare_mass_read(state)


def serve_checked(toy, schedule):
    kv, asked = toy.kv(num_pages=32, cache_pages=8), requests(toy)
    g = kv.geometry
    view = ScoredPages(KVSpecConfig(), ViewShape(g.num_layers, g.num_kv_heads, 0, g.page_size))
    engine = getattr(toy, schedule)(kv, toy.model, KVSpecConfig(), view=view)
    checked = CheckedScorer(toy, engine.scorer, asked, view)
    engine.scorer = engine.loop.scorer = checked
    engine.serve(asked)
    return checked


@pytest.mark.parametrize("schedule", ["Engine", "RoundEngine"])
def test_the_queries_are_those_of_the_last_verified_tokens(toy, schedule):
    checked = serve_checked(toy, schedule)
    assert checked.num_scored > 20
    assert checked.num_selected > 5


def test_queries_of_rejected_drafts_are_noticed(toy, monkeypatch):
    right = TargetQueries.before
    monkeypatch.setattr(
        TargetQueries, "before", lambda self, index, end: right(self, index, end + 1)
    )
    with pytest.raises((AssertionError, RuntimeError)):
        serve_checked(toy, "RoundEngine")
