"""A link to a prefix server, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_kvspec.transport.loop import Loop
from sglang_kvspec.transport.prefixes.client import StoreClient
from sglang_kvspec.transport.prefixes.events import StoreEvent
from sglang_kvspec.transport.prefixes.frames import Chain
from sglang_kvspec.transport.session import LinkState


class StoreLoop(Loop[StoreEvent]):
    """Owner of a StoreClient and of the thread that steps it. take_events() returns its events."""

    def __init__(self, client: StoreClient, on_news: Callable[[], None] | None = None) -> None:
        self._client = client
        super().__init__(client, "link to the prefix server", on_news)

    @property
    def is_live(self) -> bool:
        """Return True if the prefix server can be asked; otherwise lookups end at once."""
        self._check()
        return self._client.state is LinkState.LIVE

    @property
    def denial(self) -> str | None:
        return self._client.denial

    @property
    def published_bytes(self) -> int:
        return self._client.published_bytes

    def seek(
        self, lookup: int, chain: Chain, keys: Sequence[bytes], *, anchors_first: bool = False
    ) -> None:
        """Queue a StoreClient.seek(). cancel() and publish() queue theirs, too."""
        self._post(lambda: self._client.seek(lookup, chain, keys, anchors_first=anchors_first))

    def cancel(self, lookup: int) -> None:
        self._post(lambda: self._client.cancel(lookup))

    def publish(self, upload: int, chain: Chain, content: memoryview) -> None:
        self._post(lambda: self._client.publish(upload, chain, content))
