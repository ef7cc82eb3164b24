"""N-grams under anchors: the drafts are those of the model without proposals, in fewer forwards."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.kv.forward_plan import RowKind
from sglang_kvspec.planning.proposals import Proposal
from sglang_kvspec.runtime.budget_views import RecentPages
from sglang_kvspec.runtime.draft_view import ViewShape
from sglang_kvspec.runtime.sampling import SamplingParams

LENGTHS = [(70, 40), (33, 40), (100, 34), (64, 43)]
# Few tokens are likely, so that n-grams of an output come again.
FEW = dict.fromkeys((5, 17, 40), 6.0)
PARAMS = {
    "greedy": SamplingParams(top_k=1),
    "greedy of few tokens": SamplingParams(top_k=1, logit_bias=FEW),
    "seeded": SamplingParams(temperature=0.8, top_k=12, top_p=0.95, seed=11),
    "penalised": SamplingParams(
        top_k=1, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.2
    ),
}
UNSEEDED = SamplingParams(temperature=0.9, logit_bias=FEW)


class Oracle:
    """Stand-in for RequestNgrams that knows the answer. Every `wrong_every`-th token is wrong."""

    def __init__(self, answer, wrong_every=5, most=6, probability=0.8):
        self.answer, self.wrong_every, self.most = answer, wrong_every, most
        self.probability = probability
        self.silent_every = None
        self.output = []
        self.seen = []

    def follow(self, prompt, output):
        self.output = list(output)

    def look_up(self, drafts, most):
        first = len(self.output) + len(drafts)
        if self.silent_every and first % self.silent_every == 0:
            return Proposal([], (False, 2))
        tokens = [
            token if place % self.wrong_every else token + 1
            for place, token in enumerate(self.answer[first:], start=first)
        ]
        return Proposal(tokens[: min(most, self.most)], (False, 2), self.probability)

    propose = look_up

    def begin_trial(self, proposal, drafts, num_output):
        pass

    def end_trial(self, output, drafts):
        pass

    def observe(self, proposal, num_kept):
        self.seen.append((len(proposal.tokens), num_kept))


def requests(toy, params, lengths=LENGTHS):
    rng = torch.Generator().manual_seed(5)
    return [
        toy.Request(torch.randint(toy.vocab, (n,), generator=rng).tolist(), new, params)
        for n, new in lengths
    ]


def with_oracles(toy, params):
    plain = [toy.plain_decode(toy.model, request) for request in requests(toy, params)]
    asked = requests(toy, params)
    for request, output in zip(asked, plain, strict=True):
        request.ngrams = Oracle(output.tokens)
    return asked, plain


def draft_forwards(engine):
    return sum(any(row.kind is RowKind.DRAFT for row in rows) for rows in engine.forward.rows)


def drafting_counts(engine):
    counters = engine.counters
    return (counters.drafted, counters.accepted, dict(counters.accept_histogram))


@pytest.mark.parametrize("engine_of", ["Engine", "RoundEngine"])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("pools", [{"cache_pages": None}, {"num_pages": 32, "cache_pages": 8}])
def test_output_is_that_of_plain_decoding(toy, name, engine_of, pools):
    asked, plain = with_oracles(toy, PARAMS[name])
    make = getattr(toy, engine_of)
    engine = make(toy.kv(**pools), toy.model, KVSpecConfig(), with_ngrams=True)
    toy.assert_same_output(engine.serve(asked), plain)
    assert engine.counters.accepted
    if engine_of == "RoundEngine":
        assert engine.counters.drafts.kept
        assert engine.counters.drafts.proposed > engine.counters.drafts.kept


@pytest.mark.parametrize("name", PARAMS)
def test_drafts_are_those_without_proposals_in_fewer_forwards(toy, name):
    def served(asked, **options):
        kv = toy.kv(cache_pages=None)
        engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), **options)
        return engine.serve(asked), engine

    alone, own = served(requests(toy, PARAMS[name]))
    outputs, engine = served(with_oracles(toy, PARAMS[name])[0], with_ngrams=True)
    toy.assert_same_output(outputs, alone)
    assert drafting_counts(engine) == drafting_counts(own)
    assert engine.counters.rejected
    assert draft_forwards(engine) < 0.7 * draft_forwards(own)


def test_n_grams_of_the_request_itself_propose_what_the_model_drafts(toy):
    params = PARAMS["greedy of few tokens"]
    plain = [toy.plain_decode(toy.model, request) for request in requests(toy, params)]
    engine = toy.RoundEngine(toy.kv(cache_pages=None), toy.model, KVSpecConfig(), with_ngrams=True)
    toy.assert_same_output(engine.serve(requests(toy, params)), plain)
    counts = engine.counters.drafts
    assert 0 < counts.kept < counts.proposed


def test_an_unseeded_request_draws_the_tokens_that_it_draws_without_proposals(toy):
    """The generator is used in the same order for one request at a time. So all draws are equal,
    and with them the distribution of tokens."""

    def served(*, with_ngrams):
        asked = requests(toy, UNSEEDED)
        if with_ngrams:
            for request, output in zip(asked, expected, strict=True):
                request.ngrams = Oracle(output.tokens, wrong_every=4)
        kv = toy.kv(cache_pages=None)
        engine = toy.RoundEngine(
            kv, toy.model, KVSpecConfig(), max_running=1, with_ngrams=with_ngrams
        )
        return engine.serve(asked), engine

    expected = []
    expected, own = served(with_ngrams=False)
    outputs, engine = served(with_ngrams=True)
    assert [out.tokens for out in outputs] == [out.tokens for out in expected]
    assert drafting_counts(engine) == drafting_counts(own)
    assert engine.counters.drafts.kept
    assert engine.counters.rejected


def test_what_a_view_selects_does_not_depend_on_proposals(toy):
    def view():
        shape = ViewShape(2, 2, 0, toy.kv().geometry.page_size)
        return RecentPages(KVSpecConfig(draft_view="recent", draft_budget=0.2), shape)

    def served(asked, **options):
        kv = toy.kv(cache_pages=None)
        engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), view=view(), **options)
        return engine.serve(asked), engine

    name = "greedy of few tokens"
    _, own = served(requests(toy, PARAMS[name]))
    outputs, engine = served(with_oracles(toy, PARAMS[name])[0], with_ngrams=True)
    assert drafting_counts(engine) == drafting_counts(own)
    size = engine.kv.geometry.page_size
    several = [
        row
        for rows in engine.forward.rows
        for row in rows
        if row.kind is RowKind.DRAFT and row.length > 1
    ]
    assert several
    assert all(row.start // size == (row.end - 1) // size for row in several)
    toy.assert_same_output(outputs, with_oracles(toy, PARAMS[name])[1])


def test_every_step_makes_one_draft_more_than_it_keeps(toy):
    asked, _ = with_oracles(toy, PARAMS["greedy"])
    engine = toy.RoundEngine(toy.kv(cache_pages=None), toy.model, KVSpecConfig(), with_ngrams=True)
    engine.serve(asked)
    counts = engine.counters.drafts
    assert counts.steps + counts.kept == engine.counters.drafted
    seen = [pair for request in asked for pair in request.ngrams.seen]
    assert (counts.steps, counts.proposed, counts.kept) == (
        len(seen),
        sum(proposed for proposed, _ in seen),
        sum(kept for _, kept in seen),
    )
    of_requests = [request.state.draft_counts for request in asked]
    assert sum(each.kept for each in of_requests) == counts.kept
    assert counts.ngram_report()["tokens_per_step"] == engine.counters.drafted / counts.steps


def test_a_request_drafts_no_more_than_it_is_asked_for(toy):
    asked, _ = with_oracles(toy, PARAMS["greedy"])
    engine = toy.RoundEngine(toy.kv(cache_pages=None), toy.model, KVSpecConfig(), with_ngrams=True)
    engine.serve(asked)
    # FixedRounds asks for five drafts at a time.
    assert max(engine.counters.accept_histogram) <= 5
    longest = max(
        row.length for rows in engine.forward.rows for row in rows if row.kind is RowKind.DRAFT
    )
    assert longest == 5


@pytest.mark.parametrize("name", PARAMS)
def test_ordinary_steps_between_make_the_same_drafts(toy, name):
    """At times nothing is proposed to any request."""

    def served(asked, **options):
        kv = toy.kv(cache_pages=None)
        engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), **options)
        return engine.serve(asked), engine

    alone, own = served(requests(toy, PARAMS[name]))
    asked, _ = with_oracles(toy, PARAMS[name])
    for request in asked:
        request.ngrams.silent_every = 2
    outputs, engine = served(asked, with_ngrams=True, skips_steps=True)
    toy.assert_same_output(outputs, alone)
    assert drafting_counts(engine) == drafting_counts(own)
    counts = engine.counters.drafts
    assert counts.steps + counts.kept == engine.counters.drafted
    lengths = {row.length for rows in draft_rows(engine) for row in rows}
    assert 1 in lengths
    assert max(lengths) > 1


def test_a_server_without_matches_drafts_as_if_without_ngrams(toy):
    def served(asked, **options):
        kv = toy.kv(cache_pages=None)
        engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), **options)
        engine.serve(asked)
        return engine

    asked, _ = with_oracles(toy, PARAMS["greedy"])
    for request in asked:
        request.ngrams.silent_every = 1
    engine = served(asked, with_ngrams=True, skips_steps=True)
    own = served(requests(toy, PARAMS["greedy"]))
    assert draft_forwards(engine) == draft_forwards(own)
    assert drafting_counts(engine) == drafting_counts(own)
    assert not engine.counters.drafts.proposed
    assert engine.counters.drafts.steps == engine.counters.drafted


def test_requests_of_all_kinds_share_a_forward(toy):
    kinds = [
        PARAMS["greedy"],
        PARAMS["seeded"],
        PARAMS["penalised"],
        PARAMS["greedy of few tokens"],
    ]

    def asked():
        made = requests(toy, PARAMS["greedy"])
        for request, params in zip(made, kinds, strict=True):
            request.params = params
        return made

    plain = [toy.plain_decode(toy.model, request) for request in asked()]
    served = asked()
    for request, output in zip(served, plain, strict=True):
        request.ngrams = Oracle(output.tokens)
    kv = toy.kv(cache_pages=None, num_pages=32, window_pages=12)
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), max_running=4, with_ngrams=True)
    toy.assert_same_output(engine.serve(served), plain)
    assert any(
        len(rows) == 4 and len({row.length for row in rows}) > 1 for rows in draft_rows(engine)
    )


def draft_rows(engine):
    """Return the rows of each forward that has only DRAFT rows."""
    return [rows for rows in engine.forward.rows if all(row.kind is RowKind.DRAFT for row in rows)]
