"""Drafts that read what a scorer keeps: output stays exact, and scorers see the right tensors."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from kvspec_testkit.doc_examples import load_example
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.engine.prompt_repeats import LEAD, PromptRepeats
from sglang_kvspec.kv import anchor_places
from sglang_kvspec.kv.forward_plan import RowKind, prefill_row
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.scorers.base import ALWAYS, About, Needs
from sglang_kvspec.scorers.random_tokens import RandomTokens

PLUGINS = Path(__file__).parents[3] / "plugins"
LAYERS = 2
GREEDY = SamplingParams(top_k=1)
SEEDED = SamplingParams(temperature=0.8, top_k=12, top_p=0.95, seed=11)
ABOUT = About("of a test", "", "")


def requests(toy):
    rng = torch.Generator().manual_seed(5)
    asked = [(170, 30, GREEDY), (130, 25, SEEDED), (64, 20, GREEDY), (5, 40, SEEDED)]
    return [
        toy.Request(torch.randint(toy.vocab, (n,), generator=rng).tolist(), new, params)
        for n, new, params in asked
    ]


def plug_in(class_name):
    """Return a scorer of tests/plugins."""
    path = PLUGINS / "adversarial_scorers.py"
    spec = importlib.util.spec_from_file_location("adversarial_scorers", path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses with slots are looked up by the name of their module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, class_name)()


EXAMPLE = load_example("new-compressor.md")
SCORERS = {
    "random": (RandomTokens(), False),
    "keeps nothing": (plug_in("KeepsNothing"), True),
    "keeps the wrong half": (plug_in("KeepsTheWrongHalf"), True),
    "changes its mind": (plug_in("ChangesItsMind"), False),
    "example of the documentation": (EXAMPLE.LargeValues(), False),
}


@pytest.mark.parametrize("schedule", ["Engine", "RoundEngine"])
@pytest.mark.parametrize(("scorer", "by_tokens"), SCORERS.values(), ids=SCORERS)
def test_output_is_that_of_plain_decoding(toy, scorer, by_tokens, schedule):
    plain = [toy.plain_decode(toy.model, request) for request in requests(toy)]
    kv = toy.kv(num_pages=32, window_pages=24, cache_pages=8)
    options = {"token_scorer": scorer, "by_tokens": by_tokens}
    engine = getattr(toy, schedule)(kv, toy.model, KVSpecConfig(), **options)
    toy.assert_same_output(engine.serve(requests(toy), chunk=50), plain)
    masks = [row.mask for rows in engine.forward.rows for row in rows if row.mask is not None]
    assert masks, "no draft has read a part"
    assert not all(mask.all() for mask in masks)


@pytest.mark.parametrize("schedule", ["Engine", "RoundEngine"])
@pytest.mark.parametrize("anchor_pages", [1, 12])
@pytest.mark.parametrize("scorer", [each for each, _ in SCORERS.values()], ids=SCORERS)
def test_output_is_that_of_plain_decoding_while_anchors_are_freed(
    toy, scorer, anchor_pages, schedule, monkeypatch
):
    """With few places, and with one for every page that is encoded at once."""
    monkeypatch.setattr(anchor_places, "IDLE_USES", 3)
    plain = [toy.plain_decode(toy.model, request) for request in requests(toy)]
    kv = toy.kv(num_pages=32, window_pages=24, cache_pages=8, anchor_pages=anchor_pages)
    options = {"token_scorer": scorer, "frees_anchors": True}
    engine = getattr(toy, schedule)(kv, toy.model, KVSpecConfig(), **options)
    toy.assert_same_output(engine.serve(requests(toy), chunk=50), plain)
    counters = kv.anchor_places.counters
    assert (counters.without > 0) == (anchor_pages == 1)
    if anchor_pages > 1:
        # One scorer has a head that reads everything, and all heads read what one does.
        assert (counters.freed > 0) == (scorer is not SCORERS["changes its mind"][0])
    assert kv.anchor_places.num_taken == 0, "a freed page has a place for its anchors"


@dataclass(frozen=True)
class ByPosition:
    """Score tokens by their position, times the newest of `signs`."""

    about: ClassVar[About] = ABOUT
    needs: ClassVar[Needs] = Needs()
    allocation: ClassVar[str] = "head"

    signs: list = field(default_factory=list, compare=False)

    def score(self, chunk):
        return self.signs[-1] * torch.arange(chunk.end).float().expand(chunk.keys.shape[1], -1)


def test_a_request_frees_what_it_has_computed_and_does_not_read(toy):
    """A cached prefix may be read by other requests."""
    kv, scorer = toy.kv(num_pages=32, window_pages=24, cache_pages=8, anchor_pages=31), ByPosition()
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), token_scorer=scorer, frees_anchors=True)
    engine.kept = set(range(1, 33))
    first, second = (requests(toy)[0] for _ in range(2))
    plain = [toy.plain_decode(toy.model, request) for request in (first, second)]
    for request, sign, prefix in ((first, -1, 0), (second, 1, 3)):
        scorer.signs.append(sign)
        request.pages = list(first.pages[:prefix])
        engine.serve([request])
    # Five full pages of a prompt, of which the first or the last is read.
    for request, with_anchors in (
        (first, [True, False, False, False, False]),
        (second, [True, False, False, False, True]),
    ):
        assert kv.anchor_places.have(torch.tensor(request.pages[:5])).tolist() == with_anchors
    for request, expected in zip((first, second), plain, strict=True):
        assert request.state.output == expected.tokens


def test_requests_take_the_places_of_cached_prefixes_and_not_of_one_another(toy, monkeypatch):
    monkeypatch.setattr(anchor_places, "IDLE_USES", 4)
    kv = toy.kv(num_pages=32, window_pages=24, cache_pages=8, anchor_pages=4)
    engine = toy.RoundEngine(
        kv, toy.model, KVSpecConfig(), token_scorer=ByPosition([1]), frees_anchors=True
    )
    engine.kept = set(range(1, 33))

    def request(seed, num_tokens, num_new):
        rng = torch.Generator().manual_seed(seed)
        return toy.Request(torch.randint(toy.vocab, (num_tokens,), generator=rng).tolist(), num_new)

    def have(request, first):
        num_full = request.state.committed_len // kv.geometry.page_size
        return kv.anchor_places.have(torch.tensor(request.pages[first:num_full])).tolist()

    # The prompt's last page and three of the answer have anchors, and stay cached.
    before = request(1, 65, 100)
    engine.serve([before])
    assert have(before, 1) == [True] * 4
    assert kv.anchor_places.counters.idle == 0
    both = [request(2, 20, 70), request(3, 20, 70)]
    engine.serve(both)
    # Two pages each, which they got while the other one was drafting.
    assert [have(each, 0) for each in both] == [[True, True]] * 2
    assert have(before, 1) == [False] * 4
    assert kv.anchor_places.counters.idle == 4


def test_pages_of_another_request_that_came_between_two_chunks_keep_their_anchors(toy):
    """SGLang replaces a prompt's first pages by those of a request that computed the same tokens
    first."""
    kv, scorer = toy.kv(num_pages=32, window_pages=24, anchor_pages=31), ByPosition([1])
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), token_scorer=scorer, frees_anchors=True)
    size = kv.geometry.page_size
    tokens = list(range(4 * size + 5))
    for pages, end in (([1, 2, 3, 4, 5], 4 * size + 5), ([11, 12, 13], 3 * size)):
        row = prefill_row(0, end, torch.tensor(pages), page_size=size, recent_pages=0)
        engine.forward.run_rows([row], tokens[:end])
        engine.keeper.commit(row.pages, 0, end)
        engine.keeper.flush()
    replaced = torch.tensor([1, 2, 13, 14, 15])
    row = prefill_row(3 * size, size + 5, replaced, page_size=size, recent_pages=0)
    engine.forward.run_rows([row], tokens[3 * size :])
    engine.keeper.commit(row.pages, 3 * size, row.end)
    engine.keeper.flush()
    state = RequestState("r", row.end, 0, [0], GREEDY, 9, budget=0.1)
    engine.scorer.score([(0, state, replaced)])
    # Its drafts read the last full page. Of the others, it has computed one.
    with_anchors = kv.anchor_places.have(torch.tensor([1, 2, 13, 14])).tolist()
    assert with_anchors == [True, True, False, True]


@dataclass(frozen=True)
class Watching:
    """Note chunks, and give each token its position as score."""

    about: ClassVar[About] = ABOUT
    needs: ClassVar[Needs] = Needs(drafting=True, repeats=True)
    allocation: ClassVar[str] = "head"

    seen: list = field(default_factory=list, compare=False)

    def score(self, chunk):
        count = int(chunk.memory.get("count", torch.zeros(())))
        self.seen.append((chunk, count, chunk.scores.clone()))
        chunk.memory["count"] = torch.tensor(count + 1)
        return torch.arange(chunk.end).float().expand(chunk.keys.shape[1], -1)


def dense_tensors(toy, tokens, positions):
    """Return (q, k, v) of every layer of a dense forward."""
    found = []

    def attend(layer, q, k, v):
        found.append((q, k, v))
        return toy.dense(q, k, v, 0)

    toy.model.logits(tokens, positions, attend)
    return found


def test_a_scorer_sees_what_a_dense_forward_computes(toy):
    scorer, (request,) = Watching(), requests(toy)[:1]
    engine = toy.RoundEngine(
        toy.kv(num_pages=32, window_pages=24, cache_pages=8),
        toy.model,
        KVSpecConfig(),
        token_scorer=scorer,
    )
    engine.serve([request], chunk=50)
    prompt_len, tokens = len(request.prompt), [*request.prompt, *request.state.output]
    whole = dense_tensors(toy, tokens, list(range(len(tokens))))
    kinds = {"prefill": 0, "repeat": 0, "verified": 0}
    asked, repeated, own = [0, 0], [], None
    for chunk, count, before in scorer.seen:
        assert torch.equal(before, torch.arange(chunk.start).float().expand(2, -1))
        assert count == asked[chunk.layer]
        asked[chunk.layer] += 1
        if chunk.layer == 0:
            own = None
            if chunk.start == prompt_len and len(repeated) < prompt_len:
                # Prompt tokens at positions behind the prompt.
                begin = max(0, len(repeated) - LEAD)
                again = tokens[begin : begin + len(chunk.queries)]
                repeated += tokens[len(repeated) : begin + len(again)]
                own = dense_tensors(toy, [*request.prompt, *again], list(range(chunk.end)))
        q, k, v = (own or whole)[chunk.layer]
        kind = "prefill" if chunk.end <= prompt_len else "repeat" if own else "verified"
        kinds[kind] += 1
        assert chunk.prompt_len == min(chunk.end, prompt_len)
        wanted = (q[chunk.start : chunk.end], k[: chunk.end], v[: chunk.end])
        for found, expected in zip((chunk.queries, chunk.keys, chunk.values), wanted, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert repeated == request.prompt
    assert kinds["prefill"] == LAYERS * 4
    assert kinds["verified"] > LAYERS * 2


@dataclass(frozen=True)
class Counting:
    """Give tokens the number of their request as score, and count chunks in memory."""

    about: ClassVar[About] = ABOUT
    needs: ClassVar[Needs] = Needs()
    allocation: ClassVar[str] = "head"

    requests: list = field(default_factory=list, compare=False)
    seen: list = field(default_factory=list, compare=False)

    def score(self, chunk):
        count = int(chunk.memory.get("count", torch.zeros(())))
        self.seen.append((chunk.start, count, chunk.scores.clone()))
        chunk.memory["count"] = torch.tensor(count + 1)
        return torch.full((chunk.keys.shape[1], chunk.end), float(len(self.requests)))


def serve_one(engine, scorer, request, pages=(), chunk=10**6):
    """Serve a request behind cached pages. Return the chunks that the scorer has seen."""
    request.pages = list(pages)
    scorer.requests.append(request)
    scorer.seen.clear()
    engine.serve([request], chunk)
    return list(scorer.seen)


def test_a_cached_prefix_keeps_the_scores_of_the_request_that_computed_it(toy):
    scorer, kv = Counting(), toy.kv(num_pages=32, window_pages=24, cache_pages=8)
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), token_scorer=scorer)
    first, second, third, fourth = (requests(toy)[0] for _ in range(4))
    engine.kept = set(range(1, 33))
    serve_one(engine, scorer, first)
    prefix, size = first.pages[:3], kv.geometry.page_size
    for number, request in ((2, second), (3, third)):
        (_, count, before), *_ = serve_one(engine, scorer, request, prefix)
        # Another request has scored these tokens meanwhile, but did not compute them.
        assert torch.equal(before, torch.ones(2, 3 * size))
        assert count == 0, f"request {number} found the memory of another"
        assert request.state.token_scores.scores.eq(number).all()
    engine.scorer.on_pages_freed(prefix[1:2])
    (_, _, before), *_ = serve_one(engine, scorer, fourth, prefix)
    assert before[:, size : 2 * size].eq(ALWAYS).all()
    assert before[:, :size].eq(1).all()


def test_memory_lives_from_chunk_to_chunk_of_one_prompt(toy):
    scorer, kv = Counting(), toy.kv(num_pages=32, window_pages=24, cache_pages=8)
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), token_scorer=scorer)
    seen = serve_one(engine, scorer, requests(toy)[0], chunk=50)
    assert [count for _, count, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not engine.scorer._prompts, "memory of a complete prompt is kept"


def test_a_page_that_an_answer_fills_brings_no_memory_of_its_prompt(toy):
    """The page of a prompt's last token may be a full page of a longer prefix later."""
    scorer, kv = Counting(), toy.kv(num_pages=32, window_pages=24, cache_pages=8)
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), token_scorer=scorer)
    engine.scorer.score = lambda committed: None
    (first,), (second,) = requests(toy)[:1], requests(toy)[:1]
    engine.kept = set(range(1, 33))
    serve_one(engine, scorer, first, chunk=50)
    assert engine.scorer._prompts, "the memory was taken, so that this test shows nothing"
    full = len(first.prompt) // kv.geometry.page_size + 1
    second.prompt = [*first.prompt, *first.state.output, 3][: full * kv.geometry.page_size + 9]
    (_, count, _), *_ = serve_one(engine, scorer, second, first.pages[:full])
    assert count == 0


@pytest.mark.parametrize(
    "wrong",
    [
        torch.full((2, 170), torch.nan),
        torch.zeros(2, 169),
        torch.zeros(2, 170, device="meta"),
        KeyError("a tensor"),
    ],
    ids=["NaN", "length", "device", "error"],
)
def test_a_scorer_that_fails_stops_the_start_and_no_request(toy, wrong, caplog):
    @dataclass(frozen=True)
    class Wrong:
        about: ClassVar[About] = ABOUT
        needs: ClassVar[Needs] = Needs(drafting=True)
        allocation: ClassVar[str] = "head"

        def score(self, chunk):
            if isinstance(wrong, Exception):
                raise wrong
            return wrong

    plain = [toy.plain_decode(toy.model, request) for request in requests(toy)[:1]]
    engine = toy.RoundEngine(toy.kv(), toy.model, KVSpecConfig(), token_scorer=Wrong())
    toy.assert_same_output(engine.serve(requests(toy)[:1]), plain)
    assert len([r for r in caplog.records if "the scorer Wrong failed" in r.getMessage()]) == 1
    with pytest.raises((UnsupportedError, KeyError)):
        engine.scorer.try_out(num_heads=4, hidden_size=64)


def test_long_prompts_are_not_repeated(toy):
    scorer, (request,) = Watching(), requests(toy)[:1]
    kv = toy.kv(num_pages=32, window_pages=24, cache_pages=8)
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), token_scorer=scorer)
    engine.repeats = PromptRepeats(engine.forward, len(request.prompt) + 100, least_piece=101)
    engine.serve([request])
    assert all(row.kind is not RowKind.REPEAT for rows in engine.forward.rows for row in rows)


def test_a_trial_shows_what_a_scorer_asks_for(toy):
    scorer = Watching()
    engine = toy.RoundEngine(toy.kv(), toy.model, KVSpecConfig(), token_scorer=scorer)
    engine.scorer.try_out(num_heads=4, hidden_size=64)
    assert [chunk.layer for chunk, _, _ in scorer.seen] == list(range(LAYERS))
    for chunk, _, before in scorer.seen:
        assert chunk.queries.shape == (512, 4, 16)
        assert chunk.keys.shape == chunk.values.shape == (512, 2, 16)
        assert before.shape == (2, 0)
