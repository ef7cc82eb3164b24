"""Scores of prompts by the tensors of a model, and rounds of drafts that read by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from acceptance.drafting import target_run, through_anchor
from acceptance.model import Llama
from acceptance.prompts import cut_prompts
from acceptance.rounds import DraftCaches, run_rounds
from acceptance.scored import (
    AllReads,
    Kept,
    PromptScorer,
    PromptScores,
    ScoredReads,
    score_prompts,
)

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.engine.prompt_repeats import LEAD, PIECE, pieces
from sglang_kvspec.scorers.base import ALWAYS, Needs
from sglang_kvspec.scorers.random_tokens import RandomTokens

MODEL = Path(__file__).resolve().parents[3] / "models" / "demo-5m"
SIZE, LENGTH, NEW_TOKENS, DRAFT_LEN = 64, 256, 20, 4


@dataclass
class Recorder:
    """Scorer that notes its chunks and returns ever the same score."""

    needs: Needs = field(default_factory=Needs)
    allocation: str = "head"
    value: float = 1.0
    chunks: list = field(default_factory=list)

    def score(self, chunk):
        self.chunks.append(chunk)
        return torch.full((chunk.keys.shape[1], chunk.end), self.value)


@pytest.fixture(scope="module")
def model():
    return Llama(MODEL, torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts():
    return cut_prompts(MODEL, 2, LENGTH)[0]


@pytest.fixture(scope="module")
def run(model, prompts):
    return target_run(model, prompts, NEW_TOKENS, prefill_batch=2)


@pytest.fixture
def caches(model, run):
    settings = {"page_size": SIZE, "head_dim": model.shape.head_dim, "dtype": torch.float32}
    codec = make_codec("uniform4", target="exact", anchor_bits=2, **settings)
    return DraftCaches(run, through_anchor(codec), SIZE)


def rounds_by(model, run, caches, scorer, scored, budget, unit=SIZE):
    kept = Kept(budget, scorer.allocation, unit)
    reads = ScoredReads(model, run, caches, scorer, scored, kept)
    return run_rounds(model, run, caches, reads, DRAFT_LEN)


@pytest.mark.parametrize("unit", [1, SIZE], ids=["tokens", "pages"])
def test_the_whole_budget_gives_the_rounds_of_all_tokens(model, prompts, run, caches, unit):
    dense = run_rounds(model, run, caches, AllReads(model, run), DRAFT_LEN)
    caches.reset()
    scorer = RandomTokens()
    scored = score_prompts(model, prompts, {"random": scorer})["random"]
    found = rounds_by(model, run, caches, scorer, scored, 1.0, unit)
    assert found == dense
    # Anchors of 2 bits err, so equal lengths are not those of an exact cache.
    assert {length for each in dense for length in each.accepted} != {DRAFT_LEN}


def test_reset_caches_give_the_same_rounds_again(model, run, caches):
    first = run_rounds(model, run, caches, AllReads(model, run), DRAFT_LEN)
    caches.reset()
    assert run_rounds(model, run, caches, AllReads(model, run), DRAFT_LEN) == first


def test_drafts_without_any_token_of_the_prompt_still_make_rounds(model, run, caches):
    shape = (model.shape.num_layers, model.shape.num_kv_heads, LENGTH)
    scores = torch.full(shape, -ALWAYS)
    scored = [PromptScores(scores, [{}] * shape[0]) for _ in run.tokens]
    found = rounds_by(model, run, caches, Recorder(), scored, 0.0)
    for rounds in found:
        at = 0
        for accepted, share in zip(rounds.accepted, rounds.tokens_read, strict=True):
            assert 0 <= accepted <= DRAFT_LEN
            # The newest full page is read in any case, and all generated tokens.
            assert share == pytest.approx((SIZE + at) / (LENGTH + at))
            at += accepted + 1
        assert NEW_TOKENS - DRAFT_LEN < at <= NEW_TOKENS + 1


def test_chunks_are_parts_of_the_whole_prompt(model, prompts):
    whole, parts = Recorder(Needs(hidden=True)), Recorder(Needs(hidden=True))
    for scorer, chunk in ((whole, LENGTH), (parts, 96)):
        scoring = PromptScorer(model, {"recorder": scorer}, chunk)
        model.prefill(prompts[:1], 0, observe=scoring.prefilled)
    assert len(whole.chunks) == model.shape.num_layers
    for layer, expected in enumerate(whole.chunks):
        chunks = [chunk for chunk in parts.chunks if chunk.layer == layer]
        assert [(c.start, c.end, c.prompt_len) for c in chunks] == [
            (0, 96, 96),
            (96, 192, 192),
            (192, LENGTH, LENGTH),
        ]
        assert torch.equal(torch.cat([c.queries for c in chunks]), expected.queries)
        assert torch.equal(torch.cat([c.hidden for c in chunks]), expected.hidden)
        for chunk in chunks:
            assert torch.equal(chunk.keys, expected.keys[: chunk.end])
            assert torch.equal(chunk.values, expected.values[: chunk.end])
            assert chunk.scores.shape == (model.shape.num_kv_heads, chunk.start)
        # Memory stays between chunks, and is the layer's own.
        assert all(c.memory is chunks[0].memory for c in chunks)
    assert parts.chunks[0].memory is not parts.chunks[-1].memory


def test_hidden_states_are_what_queries_are_projected_from(model, prompts):
    scorer = Recorder(Needs(hidden=True, rotary=True))
    scoring = PromptScorer(model, {"recorder": scorer})
    model.prefill(prompts[:1], 0, observe=scoring.prefilled)
    for chunk in scorer.chunks:
        weight = model.weights[f"layers.{chunk.layer}.self_attn.q_proj.weight"]
        projected = F.linear(chunk.hidden, weight).unflatten(1, (-1, model.shape.head_dim))
        unrotated = chunk.rotary.unrotate(chunk.queries, chunk.positions)
        torch.testing.assert_close(unrotated, projected)
        rotated = chunk.rotary.rotate(projected, chunk.positions)
        torch.testing.assert_close(rotated, chunk.queries)


def test_a_scorer_is_given_no_more_than_it_needs(model, prompts):
    scorer = Recorder()
    score_prompts(model, prompts[:1], {"recorder": scorer})
    assert len(scorer.chunks) == model.shape.num_layers
    assert all(c.hidden is None and c.rotary is None for c in scorer.chunks)


def test_repeats_stand_behind_the_prompt_and_read_its_keys(model, prompts):
    scorer = Recorder(Needs(repeats=True))
    scored = score_prompts(model, prompts[:1], {"recorder": scorer})["recorder"]
    repeats = [c for c in scorer.chunks if c.start >= LENGTH]
    assert len(repeats) == model.shape.num_layers
    prompt_keys = [c.keys for c in scorer.chunks if c.start == 0]
    for chunk in repeats:
        assert (chunk.start, chunk.prompt_len, chunk.end) == (LENGTH, LENGTH, 2 * LENGTH)
        assert torch.equal(chunk.keys[:LENGTH], prompt_keys[chunk.layer])
        assert chunk.scores.shape == (model.shape.num_kv_heads, LENGTH)
    # Keys of layer 0 depend on the token and its position alone.
    first = repeats[0]
    places = torch.arange(2 * LENGTH)
    unrotated = model.unrotate(first.keys, places)
    torch.testing.assert_close(unrotated[LENGTH:], unrotated[:LENGTH])
    assert scored[0].scores.shape[-1] == LENGTH


def test_a_repeat_attends_to_the_prompt_and_to_its_own_past(model, prompts):
    half = LENGTH // 2
    whole, behind = Recorder(Needs(hidden=True)), Recorder(Needs(hidden=True, repeats=True))
    scoring = PromptScorer(model, {"recorder": whole})
    model.prefill(prompts[:1], 0, observe=scoring.prefilled)
    scoring = PromptScorer(model, {"recorder": behind})
    cache, _, _ = model.prefill(prompts[:1, :half], 0, observe=scoring.prefilled)
    model.repeat(prompts[:1, half:], cache, scoring.repeated)
    for chunk in behind.chunks[model.shape.num_layers :]:
        expected = whole.chunks[chunk.layer].hidden[half:]
        torch.testing.assert_close(chunk.hidden, expected, atol=1e-4, rtol=1e-4)


def test_pieces_cover_a_prompt_and_overlap_by_their_lead():
    prompt = torch.arange(2 * PIECE + 100)[None]
    found = [torch.tensor([piece]) for piece in pieces(prompt[0].tolist(), PIECE)]
    assert found[0][0, 0] == 0
    for before, piece in pairwise(found):
        assert torch.equal(before[0, -LEAD:], piece[0, :LEAD])
    fresh = [found[0], *(piece[:, LEAD:] for piece in found[1:])]
    assert torch.equal(torch.cat(fresh, dim=1), prompt)
    assert max(piece.shape[1] for piece in found) <= PIECE


def test_verified_tokens_are_shown_after_each_round(model, prompts, run, caches):
    scorer = Recorder(Needs(drafting=True))
    scored = score_prompts(model, prompts, {"recorder": scorer})["recorder"]
    scorer.chunks.clear()
    found = rounds_by(model, run, caches, scorer, scored, 0.5)
    layers = model.shape.num_layers
    shown = [
        [c for c in scorer.chunks if c.layer == 0 and torch.equal(c.keys[:LENGTH], keys)]
        for keys in (k.transpose(0, 1)[:LENGTH] for k in run.cache[0][0])
    ]
    assert len(scorer.chunks) == layers * sum(len(each.accepted) for each in found)
    for row, (chunks, rounds) in enumerate(zip(shown, found, strict=True)):
        at = 0
        for chunk, accepted in zip(chunks, rounds.accepted, strict=True):
            assert (chunk.start, chunk.end) == (LENGTH + at, LENGTH + at + accepted + 1)
            assert chunk.prompt_len == LENGTH
            assert chunk.scores.shape == (model.shape.num_kv_heads, chunk.start)
            expected = run.queries[0][row, :, at : at + accepted + 1].transpose(0, 1)
            assert torch.equal(chunk.queries, expected)
            at += accepted + 1
    # Scores of the batch are used by all methods.
    assert all(each.scores.shape[-1] == LENGTH for each in scored)


def test_new_scores_change_what_the_next_round_reads(model, prompts, run, caches):
    class Later(Recorder):
        """Scorer that wants the whole prompt once a token was verified."""

        def score(self, chunk):
            value = ALWAYS if chunk.start >= LENGTH else 0.0
            return torch.full((chunk.keys.shape[1], chunk.end), value)

    scorer = Later(Needs(drafting=True))
    scored = score_prompts(model, prompts, {"later": scorer})["later"]
    for rounds in rounds_by(model, run, caches, scorer, scored, 0.0):
        assert rounds.tokens_read[0] == SIZE / LENGTH
        assert set(rounds.tokens_read[1:]) == {1.0}


@pytest.mark.parametrize("wrong", ["shape", "nan"])
def test_wrong_scores_are_refused(model, prompts, wrong):
    class Wrong(Recorder):
        def score(self, chunk):
            scores = super().score(chunk)
            return scores[:, 1:] if wrong == "shape" else scores * float("nan")

    with pytest.raises(ValueError, match="the scorer Wrong must return"):
        score_prompts(model, prompts[:1], {"wrong": Wrong()})
