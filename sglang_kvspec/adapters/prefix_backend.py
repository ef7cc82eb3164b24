"""Prefix cache of a KVSpec server: `--radix-cache-backend kvspec`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from sglang_kvspec.adapters.activation import config_of
from sglang_kvspec.adapters.compat.parallel_state import get_tp_group
from sglang_kvspec.adapters.compat.prefix_cache import (
    BasePrefixCache,
    TreeCacheBuildContext,
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang_kvspec.adapters.model_identity import arithmetic_of, fingerprint, hash_of_weights
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache
from sglang_kvspec.adapters.prefix_flags import PREFIX_CACHE
from sglang_kvspec.adapters.prefix_link import connect
from sglang_kvspec.adapters.ranks import ranks_of, ranks_on_a_machine, shard_of
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.units import GIB
from sglang_kvspec.kv.kept_anchors import KeptAnchors
from sglang_kvspec.kv.prefix_store import (
    MemoryStore,
    PrefixStore,
    StoreIdentity,
    StoreLimits,
    open_memory_store,
    open_store,
)
from sglang_kvspec.kv.prefix_tiers import PrefixTiers
from sglang_kvspec.runtime.remote_prefixes import EarlyStarts

# Bytes of finished prefixes that may wait for the disk, for all ranks on a machine together. Pages
# that come while the queue is full are not stored.
SPILL_QUEUE_BYTES = 256 * 2**20
# Share of pages with room for their residual in host memory, if there is a disk tier. Anchors stay
# longer than residuals, which are several times as large and can be read from disk.
HOST_RESIDUAL_SHARE = 0.75


def register() -> None:
    """Make `--radix-cache-backend kvspec` known to SGLang, once a process."""
    if get_radix_cache_factory(PREFIX_CACHE) is None:
        register_radix_cache_backend(PREFIX_CACHE, build)


def build(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Build the prefix cache of a rank. SGLang calls this once the pools and the model exist.

    Raises ConfigError if a tier has no room for a page, and PrefixStoreError if its folder cannot
    be used.
    """
    config = config_of(ctx.server_args)
    assert config is not None, "the kvspec prefix cache was chosen without --kvspec"
    if ctx.disable_radix_cache:
        return default_radix_cache_factory(ctx)
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    if not config.keeps_prefixes:
        return KVSpecRadixCache(ctx.params, pool.kv, PrefixTiers(pool.kv))
    ranks = ranks_of(get_tp_group())
    num_sharing = ranks_on_a_machine(ctx.server_args)
    weights = hash_of_weights(ctx.tp_worker.model_runner.model)
    arithmetic = arithmetic_of(ctx.server_args)
    host_maker = disk = remote = None
    if config.prefix_host_gb or config.prefix_dir:
        model = fingerprint(ctx.model_config, weights, arithmetic)
        geometry, shard = pool.kv.geometry, shard_of(ranks)
        identity = StoreIdentity.of(pool.kv.codec, geometry, model=model, shard=shard)
        host_maker = _host_maker(config, identity, num_sharing) if config.prefix_host_gb else None
        disk = _open_disk(config, identity, num_sharing) if config.prefix_dir else None
    if config.prefix_server is not None:
        remote = connect(config, pool.kv, ctx.model_config, weights, arithmetic, ranks)
    pool.kv.records.warm_up()
    kept = KeptAnchors(pool.kv) if pool.kv.plan.kept_anchor_pages else None
    pool.prefix_tiers = PrefixTiers(pool.kv, host_maker, disk, remote, kept)
    # A prefill server drafts nothing.
    if remote is not None and config.drafts and ctx.server_args.disaggregation_mode == "null":
        loaded = pool.prefix_tiers.count_loaded
        pool.early_starts = EarlyStarts(pool.kv, remote, loaded, ranks)
        pool.freed_listeners.append(pool.early_starts.release)
    return KVSpecRadixCache(
        ctx.params, pool.kv, pool.prefix_tiers, remote, ranks, pool.early_starts
    )


def _host_maker(
    config: KVSpecConfig, identity: StoreIdentity, num_sharing: int
) -> Callable[[], MemoryStore]:
    """Return a function that opens the tier in host memory. num_sharing: ranks that share it."""
    limits = StoreLimits(
        disk_bytes=int(config.prefix_host_gb * GIB) // num_sharing,
        residual_share=HOST_RESIDUAL_SHARE if config.prefix_dir else 1.0,
    )
    return partial(open_memory_store, identity, limits)


def _open_disk(config: KVSpecConfig, identity: StoreIdentity, num_sharing: int) -> PrefixStore:
    assert config.prefix_dir is not None
    page_bytes = identity.anchor_page_bytes + identity.residual_page_bytes
    limits = StoreLimits(
        disk_bytes=int(config.prefix_disk_gb * GIB) // num_sharing,
        queue_bytes=max(SPILL_QUEUE_BYTES // num_sharing, page_bytes),
    )
    # The flag's folder may serve several models, settings and ranks: each has a folder in it.
    return open_store(Path(config.prefix_dir) / identity.folder_name, identity, limits)
