"""The prefix cache under random requests: every hit reads what its tokens were computed to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import Phase

from sglang_kvspec.adapters.allocator import KVSpecAllocator
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.pools.prefix_store import chain_links
from sglang_kvspec.pools.prefix_tiers import PrefixTiers

SIZE = 32
NUM_PAGES = 10


def test_every_hit_reads_what_its_tokens_were_computed_to(run_machine, prefix_cache_machine):
    run_machine(prefix_cache_machine, 30, max_examples=40)


def loads_into_the_wrong_pages(monkeypatch):
    right = PrefixTiers.load
    monkeypatch.setattr(
        PrefixTiers, "load", lambda tiers, links, pages: right(tiers, links[::-1], pages)
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


@pytest.mark.parametrize(
    "fault",
    [
        loads_into_the_wrong_pages,
        ignores_salts,
        keeps_pages_that_could_not_be_loaded,
    ],
)
def test_the_machine_finds(run_machine, prefix_cache_machine, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_machine(prefix_cache_machine, 30, max_examples=100, phases=[Phase.generate])


def test_tiers_below_the_tree_are_all_used(make_kv, prefix_cache_machine):
    """A scripted run, which shows that the machine reaches them."""
    machine = prefix_cache_machine(make_kv, residual_share=1.0)
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
    machine.teardown()


def test_pages_are_copied_before_they_are_freed(make_kv, prefix_cache_machine, monkeypatch):
    """Without a group a node's pages have lost their content by then, and nothing is kept."""
    monkeypatch.setattr(KVSpecAllocator, "free_group_begin", lambda allocator: None)
    with pytest.raises(AssertionError, match="host"):
        test_tiers_below_the_tree_are_all_used(make_kv, prefix_cache_machine)


def test_a_retracted_request_finds_its_prefix_in_host_memory(make_kv, prefix_cache_machine):
    machine = prefix_cache_machine(make_kv, residual_share=1.0)
    machine.admit((0, 1, 0), 5, None)
    machine.finish(SimpleNamespace(draw=lambda _: machine.running[0]), False, False)
    assert machine.tree.total_size() == 0
    machine.admit((0, 1, 0), 5, None)
    assert machine.hits == {"resident": 0, "host": 3 * SIZE, "disk": 0}
    machine.teardown()
