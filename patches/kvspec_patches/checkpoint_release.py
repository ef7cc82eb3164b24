"""release_kv_cache: pages that stay as a cached prefix leave the recent window.

Since SGLang 0.5.22 `checkpoint` says that the tree keeps the KV of a request that ends, in place of
`is_insert`.
"""

from __future__ import annotations

from typing import Any

from kvspec_patches import kv_release


def hook(req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    kv_release.hook(req, tree_cache, checkpoint)
