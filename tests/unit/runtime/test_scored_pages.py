"""Scores of prompts on a GPU cache, and the lists of pages that drafts read by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from sglang_kvspec.kv.forward_plan import ForwardPlan
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import draft_row
from sglang_kvspec.runtime.draft_view import DraftReads
from sglang_kvspec.runtime.earlier_tokens import EarlierTokens
from sglang_kvspec.runtime.head_lists import HeadLists
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.prompt_scores import MOST_PREFILLS
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.scored_tokens import SamePages, ScoredPageLists, ScoredTokens
from sglang_kvspec.runtime.token_scorer import TokenScorer
from sglang_kvspec.runtime.token_scores import TokenScores
from sglang_kvspec.scorers.base import ALWAYS, About, Needs

SIZE, LAYERS, KV_HEADS, RECENT = 32, 2, 2, 1
PAGES = [7, 2, 9, 4, 11, 1]


class NoAttention:
    """Target attention whose outputs are 0."""

    splits_by_page = False

    def plan(self, rows):
        pass

    def run(self, layer, q, tail, new):
        return torch.zeros_like(q)


@dataclass(frozen=True)
class Watching:
    """Note chunks, and give each token the first element of its value as score."""

    about: ClassVar[About] = About("of a test", "", "")
    needs: ClassVar[Needs] = Needs()
    allocation: ClassVar[str] = "head"

    seen: list = field(default_factory=list, compare=False)

    def score(self, chunk):
        self.seen.append(chunk)
        return chunk.values[..., 0].T.float()


@dataclass(frozen=True)
class Remembering(Watching):
    """Note what each chunk finds in memory, and leave a number there."""

    found: list = field(default_factory=list, compare=False)

    def score(self, chunk):
        self.found.append((dict(chunk.memory), chunk.scores))
        chunk.memory["number"] = torch.tensor(len(self.found))
        return super().score(chunk)


@dataclass(frozen=True)
class Forgetting(Remembering):
    """Score all tokens anew in every chunk."""

    needs: ClassVar[Needs] = Needs(earlier=False)


def driver_of(attention_lab, kv, scorer):
    """Return a Driver of a GPU cache whose prefills are shown to a scorer, and the scorer's
    TokenScorer."""
    driver = attention_lab.Driver(kv, RECENT)
    driver.attention = DeviceAttention(kv, KV_HEADS, NoAttention())
    driver.keeper = PageKeeper(kv, RECENT)
    made = TokenScorer(kv, scorer, None, 0)
    driver.attention.show(made)
    return driver, made


def new_state(num_tokens, budget=1.0):
    return RequestState("r", num_tokens, 0, [0], SamplingParams(), 9, budget=budget)


@pytest.fixture
def kv(make_device_kv):
    return make_device_kv(encodes=True, num_layers=LAYERS)


@pytest.mark.parametrize(
    "options",
    [
        {"target": "exact"},
        {"target": "exact", "anchor_pages": 2},
        {"target": "exact", "store": True, "cache_pages": 8},
        {"target": "int8"},
    ],
)
def test_a_prefill_in_chunks_is_shown(attention_lab, make_device_kv, options):
    """At int8, earlier chunks are shown as drafts read them."""
    scorer, kv = Watching(), make_device_kv(encodes=True, num_layers=LAYERS, **options)
    is_exact = options["target"] == "exact"
    driver, _ = driver_of(attention_lab, kv, scorer)
    story = attention_lab.Story(kv, PAGES, 150)
    cuts = [0, 40, 64, 130, 150]
    driver.prefill(story, cuts)
    assert len(scorer.seen) == LAYERS * (len(cuts) - 1)
    for (start, end), chunks in zip(
        pairwise(cuts), zip(*[iter(scorer.seen)] * LAYERS, strict=True), strict=True
    ):
        for layer, chunk in enumerate(chunks):
            assert (chunk.layer, chunk.start, chunk.end, chunk.prompt_len) == (
                layer,
                start,
                end,
                end,
            )
            assert torch.equal(chunk.queries, story.q[layer, start:end])
            coded = story.with_codec(kv, layer, anchor_only=not is_exact)
            # The newest page that was full before the chunk is in the recent window.
            num_coded = max(0, start // SIZE - RECENT) * SIZE
            for found, anchors, raw in zip(
                (chunk.keys, chunk.values), coded, (story.k[layer], story.v[layer]), strict=True
            ):
                assert torch.equal(found[:num_coded], anchors[:num_coded])
                assert torch.equal(found[num_coded:], raw[num_coded:end])
                same = torch.equal(anchors[:num_coded], raw[:num_coded])
                assert same == (is_exact or num_coded == 0)


def test_requests_of_one_forward_keep_their_own_scores(attention_lab, kv):
    driver, scored = driver_of(attention_lab, kv, Watching())
    stories = [
        attention_lab.Story(kv, pages, 70, seed=seed)
        for seed, pages in enumerate(([7, 2, 9], [4, 11, 1]))
    ]
    rows = [(story, story.prefill(0, 70, RECENT)) for story in stories]
    driver.forward(*rows)
    states = [new_state(70) for _ in stories]
    committed = [
        (index, state, story.pages)
        for index, (state, story) in enumerate(zip(states, stories, strict=True))
    ]
    scored.score(committed)
    for state, story in zip(states, stories, strict=True):
        assert torch.equal(state.token_scores.scores, story.v[..., 0].transpose(1, 2).float())


@pytest.mark.parametrize(("num_others", "remembers"), [(MOST_PREFILLS, True), (100, False)])
def test_memory_of_a_prompt_that_is_not_continued_ends(attention_lab, kv, num_others, remembers):
    """A request may end between two chunks while the prefix cache keeps its pages."""
    scorer = Remembering()
    driver, scored = driver_of(attention_lab, kv, scorer)
    long, other = attention_lab.Story(kv, PAGES, 70), attention_lab.Story(kv, [3], 20)
    driver.prefill(long, [0, 40])
    for _ in range(num_others):
        driver.prefill(other, [0, 20])
        scored.score([(0, new_state(20), other.pages)])
        scored.on_pages_freed([3])
        kv.free_pages([3])
    driver.prefill(long, [40, 70])
    memory, scores = scorer.found[-LAYERS]
    assert bool(memory) == remembers
    assert torch.equal(scores, long.v[0, :40, :, 0].T.float()), "scores of pages are kept"


@pytest.mark.parametrize("scorer", [Remembering(), Forgetting()], ids=["kept", "anew"])
def test_scores_of_cached_prefixes_are_kept_for_those_who_read_them(attention_lab, kv, scorer):
    driver, scored = driver_of(attention_lab, kv, scorer)
    story = attention_lab.Story(kv, PAGES, 100)
    driver.prefill(story, [0, 40, 70])
    scored.score([(0, new_state(70), story.pages)])
    # Another request over the two full pages.
    driver.prefill(story, [64, 100])
    state = new_state(100)
    scored.score([(0, state, story.pages)])
    wanted = story.v[:, :100, :, 0].transpose(1, 2).float()
    assert torch.equal(state.token_scores.scores, wanted)
    by_chunk = zip(*[iter(scorer.found)] * LAYERS, strict=True)
    for start, chunks in zip((0, 40, 64), by_chunk, strict=True):
        for layer, (_, found) in enumerate(chunks):
            assert found.shape == (KV_HEADS, start)
            if scorer.needs.earlier:
                assert torch.equal(found, wanted[layer, :, :start])
            else:
                assert (found == ALWAYS).all()
    assert bool(scored._prompts._by_page) == scorer.needs.earlier


def test_prefills_leave_no_marks_of_time(attention_lab, kv):
    """Nothing else collects them while all requests end at the prefill."""
    driver, scored = driver_of(attention_lab, kv, Watching())
    driver.prefill(attention_lab.Story(kv, PAGES, 70), [0, 40, 70])
    assert not scored._timer._pending
    assert scored.selection_s > 0


@pytest.mark.parametrize("kind", [Watching, Forgetting])
def test_a_gpu_without_room_for_earlier_tokens_goes_on(attention_lab, kv, monkeypatch, kind):
    def raise_error(*args):
        raise torch.OutOfMemoryError

    scorer = kind()
    driver, scored = driver_of(attention_lab, kv, scorer)
    story = attention_lab.Story(kv, PAGES, 70)
    driver.prefill(story, [0, 40])
    with monkeypatch.context() as patched:
        patched.setattr(EarlierTokens, "followed_by", raise_error)
        driver.prefill(story, [40, 70])
    assert len(scorer.seen) == LAYERS, "the scorer was asked about tokens that nothing has read"
    state = new_state(70)
    scored.score([(0, state, story.pages)])
    scores = state.token_scores.scores
    assert torch.equal(scores[..., :40], story.v[:, :40, :, 0].transpose(1, 2).float())
    assert scores[..., 40:].eq(ALWAYS).all()


def test_warm_up_is_not_shown(attention_lab, kv, monkeypatch):
    scorer = Watching()
    driver, _ = driver_of(attention_lab, kv, scorer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kv, "capture_commits", lambda: None)
    driver.attention.warm_up(8)
    assert scorer.seen == []
    story = attention_lab.Story(kv, PAGES, 40)
    driver.prefill(story, [0, 40])
    assert len(scorer.seen) == LAYERS


def test_padding_of_a_prefill_is_not_shown(attention_lab, kv):
    scorer = Watching()
    driver, _ = driver_of(attention_lab, kv, scorer)
    story = attention_lab.Story(kv, PAGES, 40)
    with driver.attention.planned(ForwardPlan((story.prefill(0, 40, RECENT),))):
        for layer in range(LAYERS):
            q, k, v = (
                torch.cat((part[layer], part[layer].new_full((3, *part.shape[2:]), torch.nan)))
                for part in (story.q, story.k, story.v)
            )
            assert len(driver.attention.forward(layer, q, k, v, driver.scale)) == 43
    assert [len(chunk.keys) for chunk in scorer.seen] == [40] * LAYERS


def scores_of(*units):
    """Return the scores of one layer of two KV heads whose pages have these scores."""
    by_unit = torch.tensor(units, dtype=torch.float32)[None]
    return TokenScores(by_unit.repeat_interleave(SIZE, -1), [])


@pytest.mark.parametrize("allocation", ["head", "layer"])
@pytest.mark.parametrize("num_pages", [2, 6, 8])
def test_lists_hold_the_pages_of_the_mask(allocation, num_pages):
    lists, mask = (
        ScoredPageLists(allocation, SIZE),
        ScoredTokens(allocation, SIZE, by_tokens=False),
    )
    state = new_state(num_pages * SIZE, budget=0.4)
    state.token_scores = scores_of([ALWAYS, 3, 9, 8, 7, 1], [0, 2, 4, 6, 5, 0.5])
    seen = mask.select(state, num_pages)[..., ::SIZE]
    found = lists.select(state, num_pages)
    assert found.shape == (1, KV_HEADS, int(seen.sum(-1).max()))
    for pages, read in zip(found[0].tolist(), seen[0], strict=True):
        own = read.nonzero().flatten().tolist()
        assert pages == own + [num_pages] * (len(pages) - len(own))
    # A page more changes the lists, and another budget.
    assert lists.select(state, num_pages + 1).shape[-1] > found.shape[-1] or num_pages < 6
    state.budget = 1.0
    assert lists.select(state, num_pages) is None
    for each in (lists, mask):
        assert DraftReads(each, SIZE).tokens(state) == num_pages * SIZE


@pytest.mark.parametrize("allocation", ["head", "layer", "model"])
def test_lists_grow_with_the_request(allocation):
    lists, mask = (
        ScoredPageLists(allocation, SIZE),
        ScoredTokens(allocation, SIZE, by_tokens=False),
    )
    state = new_state(8 * SIZE, budget=0.25)
    state.token_scores = scores_of([ALWAYS, 3, 9, 8, 7, 1], [0, 2, 4, 6, 5, 0.5])
    for num_pages in (6, 7, 8, 12, 7, 0, 3):
        seen = mask.select(state, num_pages)[0, :, ::SIZE]
        for pages, read in zip(lists.select(state, num_pages)[0].tolist(), seen, strict=True):
            assert [page for page in pages if page < num_pages] == read.nonzero().flatten().tolist()
            assert pages == sorted(pages)
            assert set(pages) <= set(range(num_pages + 1))


def test_all_heads_read_the_pages_of_the_mask():
    pages, mask = SamePages(SIZE), ScoredTokens("same", SIZE, by_tokens=False)
    state = new_state(8 * SIZE, budget=0.25)
    state.token_scores = scores_of([ALWAYS, 3, 9, 8, 7, 1], [0, 2, 4, 6, 5, 0.5])
    for num_pages in (6, 7, 8, 12, 7, 0, 3):
        seen = mask.select(state, num_pages)[0, :, ::SIZE]
        assert torch.equal(seen[0], seen[1])
        found = pages.select(state, num_pages)
        assert found.tolist() == seen[0].nonzero().flatten().tolist()
        state.committed_len = num_pages * SIZE
        assert DraftReads(pages, SIZE).tokens(state) == SIZE * len(found)
    state.budget = 1.0
    assert pages.select(state, 6) is None


@pytest.mark.parametrize("view", [ScoredPageLists("head", SIZE), SamePages(SIZE)])
def test_a_request_without_scores_reads_everything(view):
    assert view.select(new_state(200, budget=0.1), 6) is None


def test_scores_that_leave_nothing_out_take_no_lists():
    state = new_state(5 * SIZE, budget=0.2)
    state.token_scores = scores_of([ALWAYS] * 5, [ALWAYS] * 5)
    assert ScoredPageLists("head", SIZE).select(state, 5) is None
    state.token_scores = scores_of([ALWAYS] * 5, [ALWAYS, ALWAYS, 1, 2, 3])
    assert ScoredPageLists("head", SIZE).select(state, 5) is not None


def test_lists_of_different_lengths_become_a_row(kv, attention_lab):
    driver, _ = driver_of(attention_lab, kv, Watching())
    story = attention_lab.Story(kv, PAGES, 5 * SIZE + 3)
    driver.prefill(story, [0, 5 * SIZE + 3])
    state = new_state(5 * SIZE + 3, budget=0.2)
    state.token_scores = scores_of([ALWAYS, ALWAYS, 9, 8, 7], [0, 2, 4, 6, 5])
    state.token_scores.scores = state.token_scores.scores.expand(LAYERS, -1, -1)
    seen = ScoredPageLists("head", SIZE).select(state, 5)
    lists = HeadLists(LAYERS, 2, torch.device("cpu"))
    row = draft_row(kv, 1, 5 * SIZE + 3, story.pages, 4, seen=seen, lists=lists)
    # The page of index 4 is in the recent window.
    by_head = row.past.permute(1, 2, 0).tolist()
    assert by_head == [[[7, 2, 9], [4, -1, -1]]] * LAYERS
    assert row.num_listed == 3
    assert row.tail_len == SIZE + 3
