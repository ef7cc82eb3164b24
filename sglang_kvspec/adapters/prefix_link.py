"""This server's link to a prefix server, and the requests that wait for what comes by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sglang_kvspec.adapters.model_identity import portable_fingerprint, versions_of_kv
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.adapters.prefix_flags import prefix_server_keys
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.pools.kv_tiers import KVTiers
from sglang_kvspec.pools.prefix_store import StoreIdentity
from sglang_kvspec.runtime.remote_prefixes import RemotePrefixes
from sglang_kvspec.transport import TokenBucket, ZmqPort
from sglang_kvspec.transport.prefixes import StoreClient, StoreLayout, StoreLoop

# Of pages that were asked for and whose requests have not started.
LANDING_BYTES = 2**30
# Of finished prefixes that wait to be published; what comes while they do is left out.
PUBLISH_QUEUE_BYTES = 256 * 2**20
# What publishing may send at once after a pause.
BURST_BYTES = 1 << 20
# How long an iteration in which nobody can go on waits for something to arrive; new requests of
# users wait as long.
_WAIT_S = 0.005


def connect(
    config: KVSpecConfig, kv: KVTiers, model_config: Any, weights: str, arithmetic: str
) -> RemotePrefixes:
    """Dial the prefix server, which need not be there yet. weights: their hash. arithmetic: see
    arithmetic_of()."""
    assert config.prefix_server is not None
    name = f"{portable_fingerprint(model_config, weights)}, {versions_of_kv()}, {arithmetic}"
    identity = StoreIdentity.of(kv.codec, kv.geometry, model=name)
    rate, bucket = config.publish_gbps * 1e9, None
    if rate:
        bucket = TokenBucket(rate, BURST_BYTES, time.monotonic())
    port = ZmqPort(config.prefix_server, bind=False, keys=prefix_server_keys(config))
    client = StoreClient(port, StoreLayout(**asdict(identity)), bucket=bucket)
    news = threading.Event()
    return RemotePrefixes(
        StoreLoop(client, on_news=news.set),
        page_bytes=identity.anchor_page_bytes + identity.residual_page_bytes,
        wait_s=config.prefix_wait_s,
        landing_bytes=LANDING_BYTES,
        queue_bytes=PUBLISH_QUEUE_BYTES if rate else 0,
        news=news,
    )


def new_batch(original: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    """Scheduler.get_new_batch_prefill, which does not see requests that wait for their prefix."""
    remote = _remote_of(scheduler)
    if remote is None:
        return original(scheduler, *args, **kwargs)
    queue = list(scheduler.waiting_queue)
    for req in queue:
        if not remote.has_asked(req.rid):
            scheduler.tree_cache.ask_remote(req)
    held = {req.rid for req in queue if remote.is_awaited(req.rid)}
    scheduler.waiting_queue = [req for req in queue if req.rid not in held]
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        left = scheduler.waiting_queue
        stays = held | {req.rid for req in left}
        old = {req.rid for req in queue}
        scheduler.waiting_queue = [
            *(req for req in queue if req.rid in stays),
            *(req for req in left if req.rid not in old),
        ]
        remote.retain(stays)


def wait_when_idle(scheduler: Any) -> None:
    """No batch runs: somebody who is held back waits for the link, not for SGLang."""
    remote = _remote_of(scheduler)
    if remote is not None and scheduler.waiting_queue:
        remote.wait_for_news(_WAIT_S)


def _remote_of(scheduler: Any) -> RemotePrefixes | None:
    cache = scheduler.tree_cache
    return cache.remote if isinstance(cache, KVSpecRadixCache) else None
