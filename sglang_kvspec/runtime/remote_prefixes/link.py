"""Protocol of a link to a prefix server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.prefixes import Chain, StoreEvent


class StoreLink(Protocol):
    """Link to a prefix server, as StoreLoop implements it."""

    @property
    def is_live(self) -> bool: ...

    @property
    def denial(self) -> str | None: ...

    @property
    def published_bytes(self) -> int: ...

    def seek(
        self, lookup: int, chain: Chain, keys: Sequence[bytes], *, anchors_first: bool = False
    ) -> None: ...

    def cancel(self, lookup: int) -> None: ...

    def publish(self, upload: int, chain: Chain, content: memoryview) -> None: ...

    def take_events(self, timeout_s: float = 0.0) -> list[StoreEvent]: ...

    def counters(self) -> LinkCounters: ...

    def close(self) -> None: ...


def link_report(link: StoreLink) -> dict[str, Any]:
    """Return the counters of a link, for /server_info. Raises TransportError if the link is
    over."""
    counters = link.counters()
    return {
        "denial": link.denial,
        "published_bytes": link.published_bytes,
        "fetched_bytes": {
            stream.name.lower(): counted.payload_bytes
            for stream, counted in counters.streams.items()
        },
        "sessions": {"begun": counters.sessions, "lost": counters.lost_sessions},
        "dropped_frames": {drop.name.lower(): n for drop, n in counters.dropped.items()},
    }
