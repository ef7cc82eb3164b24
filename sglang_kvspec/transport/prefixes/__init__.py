"""A server's link to a prefix server: look up, fetch, publish."""

from sglang_kvspec.transport.prefixes.client import StoreClient, StoreTiming
from sglang_kvspec.transport.prefixes.events import (
    AnchorFetched,
    LookupEnded,
    PageFetched,
    PublishEnded,
    StoreEvent,
)
from sglang_kvspec.transport.prefixes.frames import Chain, StoreLayout
from sglang_kvspec.transport.prefixes.loop import StoreLoop

__all__ = [
    "AnchorFetched",
    "Chain",
    "LookupEnded",
    "PageFetched",
    "PublishEnded",
    "StoreClient",
    "StoreEvent",
    "StoreLayout",
    "StoreLoop",
    "StoreTiming",
]
