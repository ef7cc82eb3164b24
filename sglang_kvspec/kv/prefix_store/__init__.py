"""Encoded prefixes on disk, which survive a restart, and which several servers may share."""

from sglang_kvspec.kv.prefix_store.budget import StoreLimits
from sglang_kvspec.kv.prefix_store.identity import StoreIdentity
from sglang_kvspec.kv.prefix_store.memory_store import MemoryStore, open_memory_store
from sglang_kvspec.kv.prefix_store.page_keys import (
    PageLink,
    StoredPage,
    chain_links,
    extend_chain,
)
from sglang_kvspec.kv.prefix_store.reader import PrefixHit, PrefixReader
from sglang_kvspec.kv.prefix_store.rows import page_rows
from sglang_kvspec.kv.prefix_store.store import PrefixStore, open_reader, open_store

__all__ = [
    "MemoryStore",
    "PageLink",
    "PrefixHit",
    "PrefixReader",
    "PrefixStore",
    "StoreIdentity",
    "StoreLimits",
    "StoredPage",
    "chain_links",
    "extend_chain",
    "open_memory_store",
    "open_reader",
    "open_store",
    "page_rows",
]
