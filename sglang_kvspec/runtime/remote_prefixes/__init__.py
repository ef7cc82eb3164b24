"""Prefixes that a prefix server stores for several servers."""

from sglang_kvspec.runtime.remote_prefixes.counters import RemoteCounters
from sglang_kvspec.runtime.remote_prefixes.early_starts import EarlyStarts
from sglang_kvspec.runtime.remote_prefixes.link import StoreLink
from sglang_kvspec.runtime.remote_prefixes.metrics import RemoteMetrics
from sglang_kvspec.runtime.remote_prefixes.remote import RemotePrefixes
from sglang_kvspec.runtime.remote_prefixes.waiting import WaitingRequests

__all__ = [
    "EarlyStarts",
    "RemoteCounters",
    "RemoteMetrics",
    "RemotePrefixes",
    "StoreLink",
    "WaitingRequests",
]
