"""Hits of which a part comes from the tiers, where SGLang takes parts and where it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvspec.adapters import prefix_cache, scheduling
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.kv.page_sources import Loaded

SIZE = 32


@pytest.mark.parametrize("takes_parts", [True, False])
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_the_pages_above_a_damaged_one_are_hits(
    make_kv, prefix_cache_machine, monkeypatch, takes_parts, damaged
):
    monkeypatch.setattr(prefix_cache, "takes_parts", lambda: takes_parts)
    machine = prefix_cache_machine(make_kv)
    machine.admit((0, 1, 0), 5, None)
    machine.finish(SimpleNamespace(draw=lambda _: machine.running[0]), True, False)
    machine.write()
    machine.start_process()
    path = machine.folder / "anchors.data"
    data = bytearray(path.read_bytes())
    data[damaged * machine.kv.plan.page_bytes.anchor] ^= 1
    path.write_bytes(data)
    machine.admit((0, 1, 0), 9, None)
    assert machine.hits == {"resident": 0, "host": 0, "disk": damaged * SIZE}
    machine.no_page_is_lost()
    machine.pools_are_consistent()
    machine.teardown()


def test_a_request_is_matched_again_after_a_part_of_its_hit_came():
    tree, counted, matched = object.__new__(KVSpecRadixCache), [], []
    tree.count_parts = lambda req, parts: counted.append((req, parts))
    req = SimpleNamespace(init_next_round_input=matched.append)
    adder = SimpleNamespace(tree_cache=tree, can_run_list=[])
    parts = [Loaded(3, 1), Loaded(1, 1, 1), None]

    def add(adder, req, align):
        assert align == 4
        tree._part = parts.pop(0)
        if tree._part is None:
            adder.can_run_list.append(req)
        return len(parts)

    assert scheduling._add(add, adder, req, (4,), {}) == 0
    assert matched == [tree, tree]
    assert counted == [(req, Loaded(4, 2, 1))]


def test_parts_of_a_request_that_is_not_admitted_are_not_counted():
    tree = object.__new__(KVSpecRadixCache)
    req = SimpleNamespace(init_next_round_input=lambda tree: None)
    adder = SimpleNamespace(tree_cache=tree, can_run_list=[object()])
    parts = [Loaded(3, 1), None]

    def add(adder, req):
        tree._part = parts.pop(0)

    assert scheduling._add(add, adder, req, (), {}) is None
    assert tree.take_part() is None
