"""The report of a prompt's hits by tier, which adds to SGLang's counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvspec_patches import cached_tokens, spec_meta_info
from sglang_kvspec.adapters import activation, hit_breakdown, request_drafts
from sglang_kvspec.adapters.hit_breakdown import LoadedTokens
from sglang_kvspec.kv.page_sources import Loaded

SIZE = 64
NOTHING_READ = {"share": None, "mass": None, "selection_ms": 0.0, "by_budget": {}}


class Request(SimpleNamespace):
    __hash__ = object.__hash__

    def finished(self):
        return self.is_finished


def request(host=0, storage=0, retracted=False, finished=False):
    return Request(
        cached_tokens_host=host,
        cached_tokens_storage=storage,
        retracted_stain=retracted,
        is_finished=finished,
    )


def test_tokens_of_pages_that_were_loaded():
    req = request(host=4 * SIZE, storage=5 * SIZE)
    assert hit_breakdown.tokens_of(req) == LoadedTokens()
    loaded = Loaded(9, num_from_disk=3, num_from_remote=2, kept_host=4, kept_disk=1)
    hit_breakdown.note(req, loaded, SIZE)
    assert hit_breakdown.tokens_of(req) == LoadedTokens(2 * SIZE, 4 * SIZE, SIZE)


def test_no_more_is_reported_than_sglang_counts():
    req = request(host=SIZE, storage=SIZE)
    hit_breakdown.note(req, Loaded(9, 3, 2, kept_host=4, kept_disk=3), SIZE)
    assert hit_breakdown.tokens_of(req) == LoadedTokens(SIZE, SIZE, 0)


def test_a_retracted_request_has_been_counted():
    req = request(host=SIZE, storage=SIZE, retracted=True)
    hit_breakdown.note(req, Loaded(2, 1, kept_host=1, kept_disk=1), SIZE)
    assert hit_breakdown.tokens_of(req) == LoadedTokens()


@pytest.mark.parametrize("remote", [0, 1])
def test_what_an_answer_says(remote):
    """Carry the counts from the scheduler's hook to the hook of the process that answers."""
    req = request(host=2 * SIZE, storage=3 * SIZE)
    hit_breakdown.note(req, Loaded(5, 3 - remote, remote, kept_host=1, kept_disk=2), SIZE)
    for _ in range(remote):
        hit_breakdown.note_drafts(req, 1)
    told = {"device": SIZE, "host": 2 * SIZE, "storage": 3 * SIZE}
    req.is_finished = True
    details = cached_tokens.hook(told, None, req)
    assert spec_meta_info._told([None, details], 1) == {
        "hit_tokens": {
            "resident": SIZE,
            "host": 2 * SIZE,
            "disk": (3 - remote) * SIZE,
            "remote": remote * SIZE,
        },
        "kept_anchors": {"host": SIZE, "disk": 2 * SIZE},
        "drafts_on_anchors": remote,
        "draft_reads": NOTHING_READ,
    }


def test_without_a_hit_nothing_is_added():
    assert cached_tokens.hook(None, None, request()) is None
    told = spec_meta_info._told(None, 0)
    assert set(told["hit_tokens"].values()) | set(told["kept_anchors"].values()) == {0}
    assert told["drafts_on_anchors"] == 0


def test_the_end_of_an_answer_says_what_drafts_read():
    req = request()
    counts = request_drafts.counts_of(req)
    counts.observe(8, 5, 0.1, context=1000, read=150, mass=0.75)
    counts.observe(2, 2, 1.0, context=1000, read=1000, mass=1.0)
    counts.selection_s = 0.5
    assert cached_tokens.hook(None, None, req) is None
    req.is_finished = True
    details = cached_tokens.hook(None, None, req)
    assert spec_meta_info._told([details], 0)["draft_reads"] == {
        "share": (8 * 150 + 2 * 1000) / 10_000,
        "mass": 0.8,
        "selection_ms": 500.0,
        "by_budget": {
            "0.1": {"verifications": 1, "drafted": 8, "accepted": 5},
            "1.0": {"verifications": 1, "drafted": 2, "accepted": 2},
        },
    }


def test_the_end_of_an_answer_says_what_was_proposed():
    req = request(finished=True)
    counts = request_drafts.counts_of(req)
    counts.observe_step(num_proposed=6, num_kept=4)
    counts.observe_step(num_proposed=0, num_kept=0)
    details = cached_tokens.hook(None, None, req)
    counts = {"steps": 2, "proposing": 1, "proposed": 6, "kept": 4}
    expected = {**counts, "tokens_per_step": 3.0}
    assert spec_meta_info._told([details], 0)["ngram"] == expected


@pytest.mark.parametrize("told", [None, {"device": SIZE, "host": 0}])
def test_details_of_cached_tokens_stay_sglangs(told, monkeypatch):
    monkeypatch.setattr(activation, "config_of", lambda server_args: object())
    req = request(finished=True)
    request_drafts.counts_of(req).observe_step(num_proposed=1, num_kept=1)
    details = cached_tokens.hook(told, None, req)
    received = SimpleNamespace(
        rids=["a"],
        completion_tokens=[1],
        cached_tokens_details=[details],
        spec_verify_ct=[0],
        spec_num_cap_tokens=[0],
        spec_num_correct_drafts=[0],
        spec_correct_drafts_histogram=[[]],
    )
    meta_info = {"cached_tokens_details": details}
    manager = SimpleNamespace(server_args=None, rid_to_state={})
    spec_meta_info.hook(None, manager, meta_info, received, 0)
    assert meta_info["cached_tokens_details"] == told
    assert meta_info["kvspec"]["draft_reads"] == NOTHING_READ
    assert meta_info["kvspec"]["ngram"]["kept"] == 1
