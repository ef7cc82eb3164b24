"""Protocol of a prefix tier on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_kvspec.kv.prefix_store import PageLink


class RemoteTier(Protocol):
    """Prefix tier on another machine. No method waits for it; only pages that arrived count."""

    def num_landed(self, links: Sequence[PageLink]) -> int:
        """Return how many of these pages, from the first on, have arrived with both parts."""
        ...

    def read(self, link: PageLink, anchor: memoryview, residual: memoryview) -> bool:
        """Copy a page that has arrived into the buffers. Return False if it has not arrived."""
        ...

    def first_to_publish(self, links: Sequence[PageLink]) -> int:
        """Return the index of the first of these pages that is of use to put()."""
        ...

    def put(self, link: PageLink, anchor: memoryview, residual: memoryview) -> bool:
        """Publish a copy of a page, some time later. Return False if no more is taken for now."""
        ...

    def weights_will_change(self) -> None: ...

    def close(self) -> None: ...

    def report(self) -> dict[str, Any]: ...
