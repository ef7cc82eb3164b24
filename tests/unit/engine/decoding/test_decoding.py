"""Drafting, verifying, rolling back, encoding and fetching together: output is the target's."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.sampling import SamplingParams

LENGTHS = [(70, 30), (33, 30), (100, 24), (64, 33)]
# About twenty encoded pages. A small cache holds those of one or two requests at a time.
LONG = [(170, 30), (130, 30), (161, 24), (150, 33)]
GREEDY = SamplingParams(top_k=1)
SAMPLED = SamplingParams(temperature=0.8, top_k=12, top_p=0.95, seed=11)
PENALISED = SamplingParams(
    top_k=1,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    repetition_penalty=1.2,
    min_new_tokens=20,
    stop_tokens=frozenset({3, 38}),
    logit_bias={5: 1.5},
)
PARAMS = {"greedy": GREEDY, "seeded": SAMPLED, "penalised": PENALISED}


@pytest.fixture(scope="module")
def requests(toy):
    """Return a function that builds the same requests each time, since serving changes them."""

    def make(params=GREEDY, lengths=LENGTHS):
        rng = torch.Generator().manual_seed(5)
        return [
            toy.Request(torch.randint(toy.vocab, (n,), generator=rng).tolist(), new, params)
            for n, new in lengths
        ]

    return make


@pytest.fixture(scope="module")
def plain(toy, requests):
    known = {}

    def decode(name="greedy", lengths=LENGTHS):
        key = (name, *lengths)
        if key not in known:
            every = requests(PARAMS[name], lengths)
            known[key] = [toy.plain_decode(toy.model, r) for r in every]
        return known[key]

    return decode


@pytest.mark.parametrize(
    ("codec", "draft_len"),
    [("log4", "auto"), ("uniform4", "auto"), ("log4", 1), ("uniform4", 7), ("log4", 0)],
)
def test_greedy_output_is_that_of_plain_decoding(toy, requests, plain, codec, draft_len):
    engine = toy.Engine(toy.kv(codec=codec), toy.model, KVSpecConfig(draft_len=draft_len))
    toy.assert_same_output(engine.serve(requests()), plain())
    counters = engine.counters
    if draft_len == 0:
        assert counters.drafted == 0
    else:
        # Without accepted and rejected drafts the comparison tests neither acceptance nor rollback.
        assert counters.accepted > 40
        assert counters.rejected > (0 if draft_len == 1 else 5)
    assert counters.emitted == sum(new for _, new in LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize(
    "pools",
    [
        {"store": False, "cache_pages": None},
        {"cache_pages": 0},
        {"cache_pages": 2},
        {"cache_pages": None},
        {"cache_pages": 3, "window_pages": 6},
    ],
    ids=["no store", "no cache", "tiny cache", "full cache", "tight window"],
)
def test_output_does_not_depend_on_where_residuals_are(toy, requests, plain, pools):
    engine = toy.Engine(toy.kv(**pools), toy.model, KVSpecConfig())
    toy.assert_same_output(engine.serve(requests()), plain())


@pytest.mark.parametrize(
    ("pools", "link_pages"),
    [
        ({"store": False, "cache_pages": None}, 0),
        ({"cache_pages": None}, 0),
        ({"cache_pages": 0}, 2),
        ({"cache_pages": 3}, 2),
        ({"cache_pages": 8}, 1),
        ({"cache_pages": 8}, 0),
        ({"cache_pages": 12, "codec": "uniform4"}, 9),
    ],
    ids=["no store", "all cached", "no cache", "tiny", "slow link", "no link", "fast link"],
)
def test_rounds_give_the_output_of_plain_decoding(toy, requests, plain, pools, link_pages):
    """Some requests draft on while others verify."""
    kv = toy.kv(num_pages=32, **pools)
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), max_running=4, link_pages=link_pages)
    toy.assert_same_output(engine.serve(requests(lengths=LONG)), plain(lengths=LONG))
    assert engine.counters.accepted
    assert engine.counters.rejected
    if pools["cache_pages"] in (8, 12):
        assert engine.num_waited
        assert kv.residuals.bytes_fetched
    elif not pools["cache_pages"]:
        assert engine.num_waited == kv.residuals.bytes_fetched == 0


def test_rounds_without_drafts_take_turns(toy, requests, plain):
    """No request drafts while fetches run, and at least one verifies in every round."""
    kv = toy.kv(num_pages=32, cache_pages=8)
    config = KVSpecConfig(draft_len=0)
    engine = toy.RoundEngine(kv, toy.model, config, max_running=4, link_pages=0)
    toy.assert_same_output(engine.serve(requests(lengths=LONG)), plain(lengths=LONG))
    assert engine.num_waited
    assert engine.counters.drafted == 0


@pytest.mark.parametrize("name", ["seeded", "penalised"])
def test_drafts_kept_over_rounds_do_not_change_what_is_sampled(toy, requests, plain, name):
    kv = toy.kv(num_pages=32, cache_pages=8)
    engine = toy.RoundEngine(kv, toy.model, KVSpecConfig(), max_running=4, link_pages=1)
    toy.assert_same_output(engine.serve(requests(PARAMS[name], LONG)), plain(name, LONG))
    assert engine.num_waited


@pytest.mark.parametrize(("chunk", "recent_pages"), [(7, 1), (32, 2), (50, 1)])
def test_output_does_not_depend_on_chunks_of_the_prompt(toy, requests, plain, chunk, recent_pages):
    config = KVSpecConfig(recent_pages=recent_pages)
    engine = toy.Engine(toy.kv(window_pages=14), toy.model, config)
    toy.assert_same_output(engine.serve(requests(), chunk), plain())


@pytest.mark.parametrize("name", ["seeded", "penalised"])
def test_seeded_and_penalised_output_is_that_of_plain_decoding(toy, requests, plain, name):
    engine = toy.Engine(toy.kv(), toy.model, KVSpecConfig())
    toy.assert_same_output(engine.serve(requests(PARAMS[name])), plain(name))
    assert engine.counters.accepted
    assert engine.counters.rejected


def test_a_cached_prefix_serves_several_requests(toy):
    rng = torch.Generator().manual_seed(9)
    prefix = torch.randint(toy.vocab, (64,), generator=rng).tolist()

    def requests():
        tails = [torch.randint(toy.vocab, (n,), generator=rng).tolist() for n in (20, 1, 40, 33)]
        return [toy.Request(prefix + tail, 30) for tail in tails]

    engine = toy.Engine(toy.kv(cache_pages=3), toy.model, KVSpecConfig())
    first, *others = requests()
    wanted = [toy.plain_decode(toy.model, r) for r in (first, *others)]
    engine.kept.update(engine.free_pages[-2:])
    served = engine.serve([first])
    for request in others:
        request.pages = first.pages[:2]
    toy.assert_same_output(served + engine.serve(others), wanted)


@pytest.mark.parametrize("codec", ["log4", "uniform4"])
def test_int8_output_is_that_of_its_own_target(toy, requests, codec):
    def serve(**options):
        pools = {"cache_pages": options.pop("cache_pages", 4)}
        kv = toy.kv(codec=codec, target="int8", **pools)
        engine = toy.Engine(kv, toy.model, KVSpecConfig(target="int8", **options))
        return engine.serve(requests()[:3]), engine

    undrafted, _ = serve(draft_len=0)
    drafted, engine = serve()
    assert engine.counters.rejected
    toy.assert_same_output(drafted, undrafted)
    toy.assert_same_output(serve(recent_pages=2, cache_pages=0)[0], undrafted)


def test_everything_is_returned_when_the_last_request_is_done(toy, requests):
    engine = toy.Engine(toy.kv(), toy.model, KVSpecConfig())
    engine.serve(requests())
    assert sorted(engine.free_pages) == list(range(1, 25))
    kv = engine.kv
    kv.residuals.finish_fetches()
    assert len(kv.window.slots) == len(kv.residuals.cache_slots) == 0
    assert kv.residuals.table.counts()["ABSENT"] == 25


def test_unseeded_requests_finish_and_repeat_with_the_server_seed(toy, requests):
    params = SamplingParams(temperature=1.2, min_p=0.02)
    runs = [
        toy.Engine(toy.kv(), toy.model, KVSpecConfig()).serve(requests(params)) for _ in range(2)
    ]
    assert [out.tokens for out in runs[0]] == [out.tokens for out in runs[1]]
    assert [len(out.tokens) for out in runs[0]] == [new for _, new in LENGTHS]
