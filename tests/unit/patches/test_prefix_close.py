"""The end of a server closes the tiers of its prefix cache, where SGLang does not."""

from __future__ import annotations

from types import SimpleNamespace

from kvspec_patches import prefix_close
from sglang_kvspec.adapters.prefix_cache import CLOSE_TIMEOUT_S, KVSpecRadixCache


def test_the_end_of_a_server_closes_the_tiers() -> None:
    closed: list[float] = []
    tree = object.__new__(KVSpecRadixCache)
    tree._tiers = SimpleNamespace(close=closed.append)
    prefix_close.hook(None, SimpleNamespace(tree_cache=tree))
    assert closed == [CLOSE_TIMEOUT_S]


def test_other_caches_are_left_alone() -> None:
    prefix_close.hook(None, SimpleNamespace(tree_cache=object()))
