"""Rounds of whole requests over a draft cache."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from acceptance.confidence import log_odds_and_lead, read_digits, write_digits
from acceptance.draft_weights import with_projection
from acceptance.drafting import (
    accepted_lengths,
    before_rotary,
    draft_cache,
    target_run,
    through_anchor,
)
from acceptance.model import Llama
from acceptance.prompts import cut_prompts
from acceptance.rounds import DraftCaches, run_rounds, run_rounds_at_every_token
from acceptance.view_reads import ViewReads
from bench_views import make_view

from sglang_kvspec.codecs import make_codec

MODEL = Path(__file__).resolve().parents[3] / "models" / "demo-5m"
SIZE, LENGTH, NEW_TOKENS, DRAFT_LEN = 64, 448, 48, 8


@pytest.fixture(scope="module")
def model():
    return Llama(MODEL, torch.device("cpu"))


@pytest.fixture(scope="module")
def run(model):
    prompts, _ = cut_prompts(MODEL, 3, LENGTH)
    return target_run(model, prompts, NEW_TOKENS, prefill_batch=2)


def rounds_of(model, run, page_map, view):
    caches = DraftCaches(run, page_map, SIZE)
    reads = ViewReads(model, run, caches, *make_view(view, model))
    return run_rounds(model, run, caches, reads, DRAFT_LEN)


def anchors(model):
    settings = {"page_size": SIZE, "head_dim": model.shape.head_dim, "dtype": torch.float32}
    return through_anchor(make_codec("uniform4", target="exact", **settings))


def test_drafts_over_the_exact_cache_are_all_accepted(model, run):
    for rounds in rounds_of(model, run, lambda k, v: (k, v), "all"):
        assert set(rounds.accepted) == {DRAFT_LEN}
        # Each round emits one token more than it accepts.
        assert len(rounds.accepted) == (NEW_TOKENS - DRAFT_LEN) // (DRAFT_LEN + 1) + 1
        assert set(rounds.pages_read) == set(rounds.mass) == {1.0}


def test_the_first_round_is_that_of_a_single_draft(model, run):
    page_map = anchors(model)
    single = accepted_lengths(model, run, draft_cache(run, page_map, SIZE))
    found = rounds_of(model, run, page_map, "all")
    assert [each.accepted[0] for each in found] == single.clamp_max(DRAFT_LEN).tolist()


def test_keys_are_mapped_as_they_are_in_front_of_the_rotary_embedding(model):
    requests, num_pages, heads, dim = 2, 3, 2, model.shape.head_dim
    shape = (requests, num_pages * SIZE, heads, dim)
    flat, v = torch.randn(2, *shape)
    positions = torch.arange(num_pages * SIZE)
    k = torch.stack([model.rotate(each, positions) for each in flat])
    pages = [part.reshape(-1, SIZE, heads, dim) for part in (k, v, flat)]
    seen = []

    def doubled(k, v):
        seen.append(k)
        return 2 * k, v + 1

    mapped = before_rotary(doubled, model, num_pages)(*pages[:2])
    # A turn there and back errs by a few roundings of fp32.
    torch.testing.assert_close(seen[0], pages[2], atol=1e-5, rtol=0)
    torch.testing.assert_close(mapped[0], 2 * pages[0], atol=1e-5, rtol=0)
    assert torch.equal(mapped[1], pages[1] + 1)


def test_a_view_reads_its_share_and_drafts_otherwise(model, run):
    every, some = (rounds_of(model, run, anchors(model), view) for view in ("all", "pages:0.02"))
    assert [each.accepted for each in some] != [each.accepted for each in every]
    for rounds in some:
        # The first page, the best one, and the newest two, of seven pages.
        assert rounds.pages_read[0] == pytest.approx(4 / 7)
        assert 4 / 7 < rounds.mass[0] < 1


def test_the_best_pages_have_more_mass_than_the_newest(model, run):
    best, newest = (
        [each.mass[0] for each in rounds_of(model, run, anchors(model), view)]
        for view in ("pages:0.02", "recent:0.02")
    )
    assert all(a >= b for a, b in zip(best, newest, strict=True))
    assert sum(best) > sum(newest)


def test_rounds_at_every_token_hold_those_behind_rejections(model, run):
    page_map = anchors(model)
    behind = rounds_of(model, run, page_map, "all")
    caches = DraftCaches(run, page_map, SIZE)
    every = run_rounds_at_every_token(model, run, caches, DRAFT_LEN)
    for some, whole in zip(behind, every, strict=True):
        at = 0
        for accepted in some.accepted:
            assert whole.accepted[at] == accepted
            at += accepted + 1
        assert len(whole.accepted) == NEW_TOKENS - DRAFT_LEN + 1
        assert {len(read_digits(each)) for each in whole.top + whole.lead} == {DRAFT_LEN}
        assert not some.top


def test_confidence_is_written_with_two_digits_a_draft():
    logits = torch.tensor([[0.0, 0.0, -100.0], [10.0, 0.0, 0.0], [100.0, 0.0, 0.0]])
    log_odds, lead = log_odds_and_lead(logits).unbind(-1)
    assert log_odds.tolist() == pytest.approx([0, 10 - math.log(2), 100 - math.log(2)], abs=1e-5)
    assert lead.tolist() == [0, 10, 100]
    assert write_digits([-5, 0, 1, *log_odds.tolist()]) == "0024322498" + "99"
    assert list(read_digits("002499")) == [0, 24, 99]


def test_a_projection_for_drafts_leaves_the_embeddings(model):
    tokens, _ = cut_prompts(MODEL, 1, SIZE)
    cache, logits, _ = model.prefill(tokens, 0)
    other = with_projection(model, 2 * model.projection)
    found_cache, found, _ = other.prefill(tokens, 0, all_logits=True)
    torch.testing.assert_close(found, 2 * logits)
    for layer, found_layer in zip(cache, found_cache, strict=True):
        assert all(map(torch.equal, layer, found_layer))
