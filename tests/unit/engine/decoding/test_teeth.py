"""Deliberate faults must be caught by the comparison that test_decoding.py makes."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.kv.residual_cache import ResidualCache
from sglang_kvspec.runtime import spec_sampler
from sglang_kvspec.runtime.reference_attention import ReferenceAttention
from sglang_kvspec.runtime.request_state import RequestState


@pytest.fixture(scope="module")
def serve_and_compare(toy):
    """Return a function that serves a few greedy requests, which reuse pages, and compares with
    plain decoding."""

    def requests():
        rng = torch.Generator().manual_seed(5)
        lengths = [(70, 25), (33, 25), (100, 25), (64, 30)]
        return [
            toy.Request(torch.randint(toy.vocab, (n,), generator=rng).tolist(), new)
            for n, new in lengths
        ]

    plain = [toy.plain_decode(toy.model, r) for r in requests()]

    def run(target="exact"):
        engine = toy.Engine(toy.kv(target=target), toy.model, KVSpecConfig(target=target))
        toy.assert_same_output(engine.serve(requests()), plain)

    return run


def test_without_a_fault_the_comparison_passes(serve_and_compare):
    serve_and_compare()


def test_accepting_without_comparing(serve_and_compare, monkeypatch):
    monkeypatch.setattr(
        spec_sampler, "accept_matching", lambda drafts, targets: [*drafts, targets[-1]]
    )
    with pytest.raises(AssertionError, match="differs in"):
        serve_and_compare()


def test_accepting_one_draft_too_many(serve_and_compare, monkeypatch):
    right = spec_sampler.accept_matching

    def generous(drafts, targets):
        kept = len(right(drafts, targets))
        return [*drafts[:kept], targets[kept]] if kept < len(targets) else list(targets)

    monkeypatch.setattr(spec_sampler, "accept_matching", generous)
    with pytest.raises(AssertionError, match="differs in"):
        serve_and_compare()


def test_verifying_by_the_logits_of_the_next_row(serve_and_compare, monkeypatch):
    right = spec_sampler.accept_matching
    monkeypatch.setattr(
        spec_sampler, "accept_matching", lambda d, targets: right(d, [*targets[1:], targets[-1]])
    )
    with pytest.raises(AssertionError, match="differs in"):
        serve_and_compare()


def test_a_skipped_rollback(serve_and_compare, monkeypatch):
    right = RequestState.commit

    def keep_drafts(state, emitted):
        drafts = list(state.drafts)
        right(state, emitted)
        state.drafts.extend(drafts)

    monkeypatch.setattr(RequestState, "commit", keep_drafts)
    with pytest.raises(AssertionError, match="left drafts behind"):
        serve_and_compare()


def test_values_written_by_drafts_and_kept(serve_and_compare, monkeypatch):
    right = ReferenceAttention._write

    def last_token_only(attention, layer, row, k, v):
        if row.kind is RowKind.VERIFY:
            pages = row.pages
            row, k, v = Row(row.kind, row.end - 1, 1, pages), k[-1:], v[-1:]
        right(attention, layer, row, k, v)

    monkeypatch.setattr(ReferenceAttention, "_write", last_token_only)
    with pytest.raises(AssertionError, match="differs in"):
        serve_and_compare()


@pytest.mark.parametrize("read", ["read_target", "read_draft"])
def test_a_read_one_page_off(serve_and_compare, monkeypatch, read):
    right = getattr(ReferenceKVCache, read)

    def off_by_one(kv, layer, pages, *into):
        return right(kv, layer, torch.cat((pages[:1], pages[:-1])), *into)

    monkeypatch.setattr(ReferenceKVCache, read, off_by_one)
    if read == "read_target":
        with pytest.raises(AssertionError, match="differs in"):
            serve_and_compare()
    else:
        # Drafts may read wrong pages without any harm.
        serve_and_compare()


def test_residuals_of_the_previous_generation(serve_and_compare, monkeypatch):
    right = ResidualCache.write

    def first_generation_only(tiers, layer, pages, records):
        fresh = [tiers.table.ref(page).generation == 0 for page in pages.tolist()]
        right(tiers, layer, pages[fresh], records[fresh])

    monkeypatch.setattr(ResidualCache, "write", first_generation_only)
    with pytest.raises(AssertionError, match="differs in"):
        serve_and_compare()


def test_residuals_missing_from_the_store(serve_and_compare, monkeypatch):
    right = ResidualCache.write

    def not_written_through(tiers, layer, pages, records):
        store = tiers.store
        right(tiers, layer, pages, records)
        store.write(layer, pages, torch.zeros_like(records))

    monkeypatch.setattr(ResidualCache, "write", not_written_through)
    with pytest.raises(AssertionError, match="differs in"):
        serve_and_compare()


def test_anchors_read_as_the_target(serve_and_compare, monkeypatch):
    monkeypatch.setattr(ReferenceKVCache, "read_target", ReferenceKVCache.read_draft)
    with pytest.raises(AssertionError, match="differs in"):
        serve_and_compare()


def test_eight_bits_are_not_exact(serve_and_compare):
    with pytest.raises(AssertionError, match="differs in"):
        serve_and_compare(target="int8")
