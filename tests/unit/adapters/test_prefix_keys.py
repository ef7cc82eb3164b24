"""Keys and namespaces of requests that may not share KV differ."""

from __future__ import annotations

from array import array
from itertools import combinations
from types import SimpleNamespace

import pytest

from sglang_kvspec.adapters import prefix_cache
from sglang_kvspec.adapters.prefix_cache import namespace_of


def key(extra, salt):
    return SimpleNamespace(extra_key=extra, cache_salt=salt)


def test_no_two_owners_share_a_namespace(monkeypatch):
    monkeypatch.setattr(prefix_cache, "salt_of", lambda key: key.cache_salt)
    texts = (None, "", "=", "a", "=a", "1=a", "a=b", "#none==a", "none", "1=a=b", "=a=b")
    keys = [key(extra, salt) for extra in texts for salt in texts]
    for one, other in combinations(keys, 2):
        assert namespace_of(one) != namespace_of(other), (one, other)


def test_requests_without_either_share_one(monkeypatch):
    monkeypatch.setattr(prefix_cache, "salt_of", lambda key: key.cache_salt)
    assert namespace_of(key(None, None)) == b""
    # As stores that SGLang 0.5.17 wrote have it.
    assert namespace_of(key("lora", None)) == b"=lora"


@pytest.mark.parametrize("limit", [None, 2])
def test_a_key_has_what_its_owner_has(limit):
    owner = SimpleNamespace(extra_key="lora", cache_salt="salt")
    made = prefix_cache.prefix_key(array("q", [1, 2, 3]), owner, limit=limit)
    assert made.extra_key == "lora"
    assert prefix_cache.salt_of(made) == ("salt" if hasattr(made, "cache_salt") else None)
    again = prefix_cache.prefix_key(array("q", [1, 2, 3]), made)
    assert namespace_of(again) == namespace_of(made)
    assert len(made) == (3 if limit is None else limit)
