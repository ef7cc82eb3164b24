"""The radix cache and its registry: hits from lower tiers need its internals."""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
)

__all__ = [
    "BasePrefixCache",
    "EvictParams",
    "EvictResult",
    "InitLoadBackParams",
    "InsertParams",
    "MatchPrefixParams",
    "MatchResult",
    "RadixCache",
    "RadixKey",
    "TreeCacheBuildContext",
    "TreeNode",
    "default_radix_cache_factory",
    "get_radix_cache_factory",
    "register_radix_cache_backend",
]
