"""A link to a store on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_kvspec.transport.loop import Loop
from sglang_kvspec.transport.prefixes.client import StoreClient
from sglang_kvspec.transport.prefixes.events import StoreEvent
from sglang_kvspec.transport.prefixes.frames import Chain
from sglang_kvspec.transport.session import LinkState


class StoreLoop(Loop[StoreEvent]):
    """Takes a StoreClient over. What was asked through it is told by take_events()."""

    def __init__(self, client: StoreClient, on_news: Callable[[], None] | None = None) -> None:
        self._client = client
        super().__init__(client, "link to the prefix server", on_news)

    @property
    def is_live(self) -> bool:
        """Whether there is any use in asking."""
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
        """As StoreClient.seek, later; so are the following."""
        self._post(lambda: self._client.seek(lookup, chain, keys, anchors_first=anchors_first))

    def cancel(self, lookup: int) -> None:
        self._post(lambda: self._client.cancel(lookup))

    def publish(self, upload: int, chain: Chain, content: memoryview) -> None:
        self._post(lambda: self._client.publish(upload, chain, content))
