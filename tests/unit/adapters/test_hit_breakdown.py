"""The report of a prompt's hits by tier, which adds to SGLang's counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvspec_patches import cached_tokens, spec_meta_info
from sglang_kvspec.adapters import hit_breakdown
from sglang_kvspec.adapters.hit_breakdown import LoadedTokens
from sglang_kvspec.kv.page_sources import Loaded

SIZE = 64


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def request(host=0, storage=0, retracted=False):
    return Request(
        cached_tokens_host=host, cached_tokens_storage=storage, retracted_stain=retracted
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
    details = cached_tokens.hook(told, None, req)
    assert spec_meta_info._hits([None, details], 1) == {
        "hit_tokens": {
            "resident": SIZE,
            "host": 2 * SIZE,
            "disk": (3 - remote) * SIZE,
            "remote": remote * SIZE,
        },
        "kept_anchors": {"host": SIZE, "disk": 2 * SIZE},
        "drafts_on_anchors": remote,
    }


def test_without_a_hit_nothing_is_added():
    assert cached_tokens.hook(None, None, request()) is None
    hits = spec_meta_info._hits(None, 0)
    assert set(hits["hit_tokens"].values()) | set(hits["kept_anchors"].values()) == {0}
    assert hits["drafts_on_anchors"] == 0
