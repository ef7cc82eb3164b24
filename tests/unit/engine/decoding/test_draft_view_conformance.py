"""What the engine asks of any draft view. Another package can run this with its own in VIEWS."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.draft_view import AllPages
from sglang_kvspec.runtime.sampling import SamplingParams

PLUGINS = Path(__file__).parents[3] / "plugins"
GREEDY = SamplingParams(top_k=1)
SEEDED = SamplingParams(temperature=0.8, top_k=12, top_p=0.95, seed=11)


def toy_view():
    spec = importlib.util.spec_from_file_location("toy_view", PLUGINS / "toy_view.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SinksAndRecent(KVSpecConfig())


VIEWS = {"all": lambda: AllPages(KVSpecConfig()), "sinks and recent": toy_view}
every_view = pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)


def requests(toy, params):
    rng = torch.Generator().manual_seed(5)
    lengths = [(170, 40), (130, 40), (161, 34), (64, 43)]
    return [
        toy.Request(torch.randint(toy.vocab, (n,), generator=rng).tolist(), new, params)
        for n, new in lengths
    ]


@every_view
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("schedule", ["Engine", "RoundEngine"])
def test_output_is_that_of_plain_decoding(toy, make, params, schedule):
    plain = [toy.plain_decode(toy.model, request) for request in requests(toy, params)]
    kv = toy.kv(num_pages=32, cache_pages=8)
    engine = getattr(toy, schedule)(kv, toy.model, KVSpecConfig(), view=make())
    toy.assert_same_output(engine.serve(requests(toy, params)), plain)
    assert engine.counters.accepted


@every_view
@pytest.mark.parametrize("num_pages", range(12))
def test_a_view_selects_some_of_the_pages_in_their_order(make, num_pages):
    view = make()
    seen = view.select(None, num_pages)
    if seen is None:
        return
    assert seen.dtype == torch.int64
    chosen = seen.tolist()
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(num_pages))
    assert view.select(None, num_pages).tolist() == chosen, "ranks would choose differently"


def test_a_view_decides_what_drafts_read(toy):
    """Drafts over fewer pages agree less often."""

    def accepted(view):
        engine = toy.Engine(toy.kv(num_pages=32), toy.model, KVSpecConfig(), view=view)
        engine.serve(requests(toy, GREEDY))
        return engine.counters.mean_accept_len

    assert accepted(toy_view()) < accepted(None)
