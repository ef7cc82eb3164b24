"""Scheduler.release_host_resources: closes the prefix tiers when a server ends.

Until 0.5.16 SGLang knows the host pool of its own hierarchical cache only. Since 0.5.17 it tells
every prefix cache.
"""

from __future__ import annotations

from typing import Any


def hook(result: None, self: Any) -> None:
    release = getattr(self.tree_cache, "release_host_resources", None)
    if release is not None:
        release()
