"""Conformance tests of any draft view. Another package can run this file with its own view in
VIEWS."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from kvspec_testkit.doc_examples import load_example
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.budget_views import RecentPages, ScoredPages
from sglang_kvspec.runtime.draft_view import AllPages, ViewShape
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

PLUGINS = Path(__file__).parents[3] / "plugins"
GREEDY = SamplingParams(top_k=1)
SEEDED = SamplingParams(temperature=0.8, top_k=12, top_p=0.95, seed=11)


def plug_in(module_name, class_name):
    """Return the view class of a file in PLUGINS."""
    spec = importlib.util.spec_from_file_location(module_name, PLUGINS / f"{module_name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, class_name)


BY_HEAD = "sinks and recent by head"
EXAMPLE = load_example("new-draft-view.md")
VIEWS = {
    "all": AllPages,
    "pages": ScoredPages,
    "recent": RecentPages,
    "sinks and recent": plug_in("toy_view", "SinksAndRecent"),
    BY_HEAD: plug_in("toy_head_view", "SinksAndRecentByHead"),
    "example of the documentation": EXAMPLE.Strided,
    "example by head": EXAMPLE.RecentByHead,
}
every_view = pytest.mark.parametrize("view_class", VIEWS.values(), ids=VIEWS)


def make_state(num_layers, num_kv_heads, num_pages, first_kv_head=0):
    """Make the state of a request of which num_pages pages were full when it was last scored."""
    rng = torch.Generator().manual_seed(num_pages)
    mass = torch.rand((num_layers, 16, num_pages), generator=rng)
    mass = mass[:, first_kv_head : first_kv_head + num_kv_heads]
    return RequestState("r", 0, 0, [], GREEDY, 9, num_scored=num_pages, page_mass=mass, budget=0.1)


def make_view(view_class, g, first_kv_head=0):
    """Make a view for the geometry of one rank."""
    shape = ViewShape(g.num_layers, g.num_kv_heads, first_kv_head, g.page_size)
    return view_class(KVSpecConfig(), shape)


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
def test_output_is_that_of_plain_decoding(toy, view_class, params, schedule):
    plain = [toy.plain_decode(toy.model, request) for request in requests(toy, params)]
    kv = toy.kv(num_pages=32, cache_pages=8)
    view = make_view(view_class, kv.geometry)
    engine = getattr(toy, schedule)(kv, toy.model, KVSpecConfig(), view=view)
    toy.assert_same_output(engine.serve(requests(toy, params)), plain)
    assert engine.counters.accepted


@every_view
@pytest.mark.parametrize("num_new", [0, 1, 3])
@pytest.mark.parametrize("num_pages", range(12))
def test_a_view_selects_some_of_the_pages_in_their_order(toy, view_class, num_pages, num_new):
    geometry = toy.kv(num_pages=32).geometry
    view = make_view(view_class, geometry)
    lists = (geometry.num_layers, geometry.num_kv_heads)
    seen = view.select(make_state(*lists, max(0, num_pages - num_new)), num_pages)
    if seen is None:
        return
    assert (seen.dtype, seen.device.type) == (torch.int64, "cpu")
    lists = lists if view.per_head else ()
    assert seen.shape[:-1] == lists
    for chosen in seen.view(-1, seen.shape[-1]).tolist():
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(range(num_pages))


@every_view
@pytest.mark.parametrize("num_pages", [3, 11])
def test_ranks_choose_alike(toy, view_class, num_pages):
    """Rank 1 of 2 selects for its heads what a single rank selects for them, at any time."""
    whole = toy.kv(num_pages=32).geometry
    half = whole.part(2)
    alone, second = make_view(view_class, whole), make_view(view_class, half, first_kv_head=1)
    states = {
        alone: make_state(whole.num_layers, whole.num_kv_heads, num_pages - 1),
        second: make_state(half.num_layers, half.num_kv_heads, num_pages - 1, first_kv_head=1),
    }
    want = alone.select(states[alone], num_pages)
    for view, state in states.items():
        view.select(state, num_pages + 1)
        got = view.select(state, num_pages)
        if want is None:
            assert got is None
            continue
        mine = want[:, 1:] if view is second and view.per_head else want
        assert torch.equal(got, mine)


@pytest.mark.parametrize("name", ["sinks and recent", BY_HEAD, "pages", "recent"])
def test_a_view_decides_what_drafts_read(toy, name):
    """Drafts over fewer pages agree less often."""

    def accepted(view_class):
        kv = toy.kv(num_pages=32)
        view = None if view_class is None else make_view(view_class, kv.geometry)
        engine = toy.Engine(kv, toy.model, KVSpecConfig(), view=view)
        engine.serve(requests(toy, GREEDY))
        return engine.counters.mean_accept_len

    assert accepted(VIEWS[name]) < accepted(None)
