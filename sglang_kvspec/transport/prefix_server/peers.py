"""Servers that use a prefix server: their sessions, stores and uploads."""

from __future__ import annotations

from secrets import randbits

from sglang_kvspec.core.errors import PrefixStoreError
from sglang_kvspec.kv.prefix_store import PageLink, PrefixStore, extend_chain
from sglang_kvspec.transport.prefix_server.outbox import Outbox
from sglang_kvspec.transport.prefix_server.shelves import Shelves
from sglang_kvspec.transport.prefixes.frames import (
    MAX_SEEK_PAGES,
    TOKEN_BYTES,
    Found,
    Greet,
    Kept,
    Part,
    Publish,
    Seek,
)
from sglang_kvspec.transport.wire import Buffer, Drop, FrameError

MAX_PEERS = 256
# Seconds of silence after which a server is forgotten. Its link probes every half second.
GONE_S = 30.0


class _Upload:
    """One page that is arriving."""

    def __init__(self, number: int, link: PageLink, num_bytes: int) -> None:
        self.number, self.link = number, link
        self.content = bytearray(num_bytes)
        self.num_arrived = 0


class Peer:
    """Server that was admitted."""

    def __init__(self, greeting: Greet, store: PrefixStore, now_s: float) -> None:
        self.nonce, self.session = greeting.nonce, randbits(62)
        self.heard_s = now_s
        self._layout, self._store = greeting.layout, store
        self._upload: _Upload | None = None
        self.outbox = Outbox(store, greeting.layout, self.session)

    def seek(self, frame: Seek) -> Found:
        links = self._links(frame)
        if len(links) > MAX_SEEK_PAGES:
            detail = f"the lookup has {len(links)} pages, limit {MAX_SEEK_PAGES}"
            raise FrameError(Drop.OVERSIZED, detail)
        hit = self._store.lookup_links(links)
        stamps = tuple(page.stamp for page in hit.pages)
        return Found(self.session, frame.lookup, stamps, hit.num_complete)

    def publish(self, frame: Publish) -> None:
        """Begin an upload. An upload whose Parts are incomplete is dropped."""
        self._upload = None
        links = self._links(frame)
        if len(links) != 1:
            raise FrameError(Drop.MISPLACED, f"the upload has {len(links)} pages, expected 1")
        num_bytes = self._layout.anchor_page_bytes + self._layout.residual_page_bytes
        self._upload = _Upload(frame.upload, links[0], num_bytes)

    def part(self, frame: Part, payload: Buffer) -> Kept | None:
        """Take in a part of the upload. Return the answer if it is the last part."""
        upload, end = self._upload, frame.offset + len(payload)
        if upload is None or upload.number != frame.upload:
            raise FrameError(Drop.UNKNOWN, f"upload {frame.upload} is unknown")
        if frame.offset != upload.num_arrived or end > len(upload.content):
            self._upload = None
            detail = (
                f"upload {upload.number}: part from byte {frame.offset} to {end} is out of place"
            )
            raise FrameError(Drop.MISPLACED, detail)
        upload.content[frame.offset : end] = payload
        upload.num_arrived = end
        if end < len(upload.content):
            return None
        self._upload = None
        content = memoryview(upload.content)
        split = self._layout.anchor_page_bytes
        is_kept = self._store.put(upload.link, content[:split], content[split:])
        return Kept(self.session, upload.number, is_kept)

    def _links(self, chain: Seek | Publish) -> list[PageLink]:
        page_bytes = self._layout.page_size * TOKEN_BYTES
        if len(chain.tokens) % page_bytes:
            detail = (
                f"{len(chain.tokens)} bytes of tokens are not whole pages of {page_bytes} bytes"
            )
            raise FrameError(Drop.MISPLACED, detail)
        return list(
            extend_chain(chain.parent, chain.position, chain.tokens, self._layout.page_size)
        )


class Peers:
    """Peers by the name that ZMQ routes by."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._peers: dict[bytes, Peer] = {}

    def greet(self, name: bytes, frame: Greet, now_s: float) -> Peer:
        """Admit a server; a greeting may be repeated. Raises PrefixStoreError to deny it."""
        peer = self._peers.get(name)
        if peer is not None and peer.nonce == frame.nonce:
            return peer
        if peer is None and len(self._peers) >= MAX_PEERS:
            raise PrefixStoreError(f"the prefix server already has {MAX_PEERS} servers, the limit")
        peer = Peer(frame, self._shelves.open(frame.layout), now_s)
        self._peers[name] = peer
        return peer

    def of(self, name: bytes, session: int, now_s: float) -> Peer | None:
        """Return the peer in this session, which was heard now; None if there is none."""
        peer = self._peers.get(name)
        if peer is None or peer.session != session:
            return None
        peer.heard_s = now_s
        return peer

    def items(self) -> list[tuple[bytes, Peer]]:
        return list(self._peers.items())

    def forget(self, name: bytes) -> None:
        self._peers.pop(name, None)

    def forget_gone(self, now_s: float) -> None:
        for name, peer in self.items():
            if now_s - peer.heard_s >= GONE_S:
                self.forget(name)
