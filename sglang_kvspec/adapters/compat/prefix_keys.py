"""Keys of prefixes: tokens, and what keeps requests apart that may not share KV. That is extra_key,
and since 0.5.18 also cache_salt, which was part of extra_key before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

__all__ = ["prefix_key", "salt_of"]


def _has_salts() -> bool:
    return "cache_salt" in RadixKey.__slots__


if _has_salts():

    def prefix_key(tokens: Sequence[int], owner: Any, limit: int | None = None) -> RadixKey:
        """Return the key of tokens of `owner`, a request or a key."""
        return RadixKey(tokens, owner.extra_key, limit=limit, cache_salt=owner.cache_salt)

else:

    def prefix_key(tokens: Sequence[int], owner: Any, limit: int | None = None) -> RadixKey:
        """Return the key of tokens of `owner`, a request or a key."""
        return RadixKey(tokens, owner.extra_key, limit=limit)


if _has_salts():

    def salt_of(key: RadixKey) -> str | None:
        return key.cache_salt  # type: ignore[no-any-return]

else:

    def salt_of(key: RadixKey) -> str | None:
        return None
