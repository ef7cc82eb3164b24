"""This server's link to a prefix server."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import Any

from sglang_kvspec.adapters.model_identity import portable_fingerprint, versions_of_kv
from sglang_kvspec.adapters.prefix_flags import prefix_server_keys
from sglang_kvspec.adapters.ranks import shard_of
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.prefix_store import StoreIdentity
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.remote_prefixes import RemotePrefixes
from sglang_kvspec.transport import TokenBucket, ZmqPort
from sglang_kvspec.transport.prefixes import StoreClient, StoreLayout, StoreLoop

# Bytes of pages that were fetched for requests which have not started, for all ranks together.
LANDING_BYTES = 2**30
# Bytes of finished prefixes that may wait to be published, for all ranks together. Pages that come
# while the queue is full are not published.
PUBLISH_QUEUE_BYTES = 256 * 2**20
# Bytes that publishing may send at once after a pause.
BURST_BYTES = 1 << 20


def connect(
    config: KVSpecConfig,
    kv: PagedKVCache,
    model_config: Any,
    weights: str,
    arithmetic: str,
    ranks: Ranks,
) -> RemotePrefixes:
    """Dial the prefix server, which need not run yet. Every rank has a link of its own, and an
    equal share of the limits. weights: their hash. arithmetic: see arithmetic_of()."""
    assert config.prefix_server is not None
    name = f"{portable_fingerprint(model_config, weights)}, {versions_of_kv()}, {arithmetic}"
    identity = StoreIdentity.of(kv.codec, kv.geometry, model=name, shard=shard_of(ranks))
    rate, bucket = config.publish_gbps * 1e9 / ranks.size, None
    if rate:
        bucket = TokenBucket(rate, BURST_BYTES, time.monotonic())
    port = ZmqPort(config.prefix_server, bind=False, keys=prefix_server_keys(config))
    layout = StoreLayout(**asdict(identity))
    client = StoreClient(port, layout, bucket=bucket, address=config.prefix_server)
    news = threading.Event()
    return RemotePrefixes(
        StoreLoop(client, on_news=news.set),
        page_bytes=identity.anchor_page_bytes + identity.residual_page_bytes,
        wait_s=config.prefix_wait_s,
        landing_bytes=LANDING_BYTES // ranks.size,
        queue_bytes=PUBLISH_QUEUE_BYTES // ranks.size if rate else 0,
        news=news,
    )
