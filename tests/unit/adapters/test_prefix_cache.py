"""The prefix cache under random requests: every hit reads the KV that was computed for its
tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import Phase

from sglang_kvspec.adapters.allocator import KVSpecAllocator
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.kv.prefix_store import chain_links
from sglang_kvspec.kv.prefix_tiers import PrefixTiers

SIZE = 32
NUM_PAGES = 10


@pytest.mark.parametrize("num_kept", [0, 4])
def test_every_hit_reads_the_kv_of_its_tokens(run_machine, prefix_cache_machine, num_kept):
    run_machine(partial(prefix_cache_machine, num_kept=num_kept), 30, max_examples=40)


def loads_into_the_wrong_pages(monkeypatch):
    right = PrefixTiers.load
    monkeypatch.setattr(
        PrefixTiers, "load", lambda tiers, links, *args: right(tiers, links[::-1], *args)
    )


def ignores_salts(monkeypatch):
    def links(cache, key, skip=0):
        return list(chain_links(key.raw_token_ids(), SIZE))[skip // SIZE :]

    monkeypatch.setattr(KVSpecRadixCache, "_links", links)


def keeps_pages_that_could_not_be_loaded(monkeypatch):
    monkeypatch.setattr(KVSpecRadixCache, "_give_back", lambda cache, slots: None)
    right = PrefixTiers.num_loadable
    monkeypatch.setattr(
        PrefixTiers, "num_loadable", lambda tiers, links: min(len(links), right(tiers, links) + 1)
    )


@pytest.mark.parametrize("fault", [ignores_salts, keeps_pages_that_could_not_be_loaded])
def test_the_machine_finds(run_machine, prefix_cache_machine, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_machine(prefix_cache_machine, 30, max_examples=400, phases=[Phase.generate])


@pytest.mark.parametrize("num_kept", [0, 3])
def test_tiers_below_the_tree_are_all_used(make_kv, prefix_cache_machine, num_kept):
    """A scripted run, which shows that the machine reaches all tiers."""
    machine = prefix_cache_machine(make_kv, residual_share=1.0, num_kept=num_kept)
    for expected in ("resident", "host", "disk"):
        machine.admit((0, 1, 0), 5, None)
        machine.finish(SimpleNamespace(draw=lambda _: machine.running[0]), True, False)
        before = dict(machine.hits)
        if expected == "host":
            machine.evict(NUM_PAGES)
        elif expected == "disk":
            machine.write()
            machine.flush()
        machine.admit((0, 1, 0), 5, None)
        gained = {tier: machine.hits[tier] - before[tier] for tier in before}
        assert gained == dict.fromkeys(gained, 0) | {expected: 3 * SIZE}
        machine.finish(SimpleNamespace(draw=lambda _: machine.running[0]), True, False)
    # A flush also drops kept anchors, so a disk hit loads both parts.
    assert machine.kept_hits == num_kept * SIZE
    machine.teardown()


def test_pages_loaded_into_others_are_found(make_kv, prefix_cache_machine, monkeypatch):
    loads_into_the_wrong_pages(monkeypatch)
    with pytest.raises(AssertionError, match="foreign KV"):
        test_tiers_below_the_tree_are_all_used(make_kv, prefix_cache_machine, 0)


def test_pages_are_copied_before_they_are_freed(make_kv, prefix_cache_machine, monkeypatch):
    """Without a free group the pages of a node are freed, and lose their content, before the
    copy."""
    monkeypatch.setattr(KVSpecAllocator, "free_group_begin", lambda allocator: None)
    with pytest.raises(AssertionError, match="host"):
        test_tiers_below_the_tree_are_all_used(make_kv, prefix_cache_machine, 0)


def test_a_retracted_request_finds_its_prefix_in_host_memory(make_kv, prefix_cache_machine):
    machine = prefix_cache_machine(make_kv, residual_share=1.0)
    machine.admit((0, 1, 0), 5, None)
    machine.finish(SimpleNamespace(draw=lambda _: machine.running[0]), False, False)
    assert machine.tree.total_size() == 0
    machine.admit((0, 1, 0), 5, None)
    assert machine.hits == {"resident": 0, "host": 3 * SIZE, "disk": 0}
    machine.teardown()


def test_pages_above_an_evicted_leaf_are_not_kept(make_kv, prefix_cache_machine):
    """The pages above the leaf are still in the tree."""
    machine = prefix_cache_machine(make_kv, residual_share=1.0, num_kept=9)
    for prompt in ((0, 1, 0), (0, 1, 1)):
        machine.admit(prompt, 5, None)
        machine.finish(SimpleNamespace(draw=lambda _: machine.running[0]), True, False)
    machine.evict(1)
    assert machine.kept.report()["pages"] == 1
    # A retracted request's own pages are evicted, but not those that it found in the tree.
    machine.admit((0, 1, 1, 1), 5, None)
    machine.finish(SimpleNamespace(draw=lambda _: machine.running[0]), False, False)
    assert machine.kept.report()["pages"] == 2
    machine.teardown()
