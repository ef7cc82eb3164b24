"""What the tiers of the prefix cache ask of prefixes on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_kvspec.kv.prefix_store import PageLink


class RemoteTier(Protocol):
    """None of this waits for the other machine: what has not come from there is not here."""

    def num_landed(self, links: Sequence[PageLink]) -> int:
        """How many of these pages, from the first on, have come here, both parts of each."""
        ...

    def read(self, link: PageLink, anchor: memoryview, residual: memoryview) -> bool:
        """Copy a page that has come here; False where it has not."""
        ...

    def first_to_publish(self, links: Sequence[PageLink]) -> int:
        """From which of these pages on put() has a use for them."""
        ...

    def put(self, link: PageLink, anchor: memoryview, residual: memoryview) -> bool:
        """Publish a copy of a page some time later; False where it takes no more for now."""
        ...

    def weights_will_change(self) -> None: ...

    def close(self) -> None: ...

    def report(self) -> dict[str, Any]: ...
