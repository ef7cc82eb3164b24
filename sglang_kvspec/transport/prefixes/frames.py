"""Frames between a server (DEALER, dials) and a prefix server, here "store" (ROUTER, listens).

A page's key is a hash over the tokens of its prefix. The store computes keys from the tokens in a
frame, so that no page can be published under another page's key.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from sglang_kvspec.transport.frames import MAX_PIECE_BYTES, Count, Name, Reason, Stream, Word
from sglang_kvspec.transport.wire import Wire

STORE_PROTOCOL = 2
# A link sends many pieces a second, so that anchors soon overtake residuals.
STORE_PIECE_BYTES = MAX_PIECE_BYTES // 4
KEY_BYTES = 32
TOKEN_BYTES = 8
MAX_SEEK_TOKENS = 1 << 16
MAX_SEEK_PAGES = 1 << 12
MAX_FETCH_PAGES = 256
# Limit of one page, anchor and residual together.
MAX_PAGE_BYTES = 256 << 20
MAX_STORE_HEAD_BYTES = 1 << 20

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Tokens = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=MAX_SEEK_TOKENS * TOKEN_BYTES)]
# xxh3 of a record, 64 bits.
Stamp = Annotated[int, Meta(ge=0)]
# Becomes part of a folder's name.
PlainName = Annotated[str, Meta(max_length=64, pattern=r"\A[a-z0-9_]+\Z")]
# "rank/size"; a part of a folder's name, too.
Shard = Annotated[str, Meta(max_length=9, pattern=r"\A[0-9]{1,4}/[1-9][0-9]{0,3}\Z")]
RecordBytes = Annotated[int, Meta(ge=1, le=MAX_PAGE_BYTES)]
Index = Annotated[int, Meta(ge=0, lt=MAX_SEEK_PAGES)]
Length = Annotated[int, Meta(ge=1, le=MAX_PIECE_BYTES)]


class Chain(NamedTuple):
    """Consecutive full pages of a prefix. position: number of pages before them. parent: key of the
    last page before them, or of a root if there is none. tokens: ids of all tokens of the pages,
    little-endian int64."""

    parent: bytes
    position: int
    tokens: bytes


class StoreFrame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class StoreLayout(StoreFrame, frozen=True):
    """Model and records of a server: the fields of StoreIdentity in kv/prefix_store."""

    model: Name
    shard: Shard
    codec: PlainName
    settings: Annotated[str, Meta(max_length=4096)]
    target: PlainName
    dtype: Name
    page_size: Annotated[int, Meta(ge=1, le=4096)]
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    anchor_page_bytes: RecordBytes
    residual_page_bytes: RecordBytes
    record_version: Count
    store_version: Count
    residual: PlainName


class Greet(StoreFrame, frozen=True):
    """Server to store: first frame of a connection, repeated until answered."""

    nonce: Word
    layout: StoreLayout


class Admit(StoreFrame, frozen=True):
    """Store to server: the answer to the Greet of `nonce`. Later frames carry `session`."""

    nonce: Word
    session: Word


class Deny(StoreFrame, frozen=True):
    """The answer to a Greet that cannot be served; nonce 0 if the Greet could not be read."""

    nonce: Word
    reason: Reason


class Unknown(StoreFrame, frozen=True):
    """The answer to a frame of a session that the store does not know: greet again."""

    session: Word


class Probe(StoreFrame, frozen=True):
    """Server to store: are you there? The store answers with the same frame."""

    session: Word


class Seek(StoreFrame, frozen=True):
    """Server to store: which of these pages are there?"""

    session: Word
    lookup: Word
    parent: Key
    position: Count
    tokens: Tokens


class Found(StoreFrame, frozen=True):
    """Store to server: answer to a Seek. stamps: checksums of the anchors that are there, from the
    first page on without a gap. num_complete: how many of these pages, from the first on, have
    residuals, too."""

    session: Word
    lookup: Word
    stamps: Annotated[tuple[Stamp, ...], Meta(max_length=MAX_SEEK_PAGES)]
    num_complete: Annotated[int, Meta(ge=0, le=MAX_SEEK_PAGES)]


class Fetch(StoreFrame, frozen=True):
    """Server to store: request for a stream of `pages`, each (key, checksum of the anchor). first:
    number of the first one among the lookup's pages."""

    session: Word
    lookup: Word
    stream: Stream
    first: Index
    pages: Annotated[tuple[tuple[Key, Stamp], ...], Meta(min_length=1, max_length=MAX_FETCH_PAGES)]


class Piece(StoreFrame, frozen=True):
    """Store to server: part of a record; the payload is the message's second part."""

    session: Word
    lookup: Word
    stream: Stream
    page: Index
    offset: Count
    length: Length


class Gone(StoreFrame, frozen=True):
    """Store to server: a record that was asked for is not there, or not as it was written."""

    session: Word
    lookup: Word
    page: Index


class Publish(StoreFrame, frozen=True):
    """Server to store: one page to publish. Its anchor, then its residual, follow in Parts."""

    session: Word
    upload: Word
    parent: Key
    position: Count
    tokens: Tokens


class Part(StoreFrame, frozen=True):
    """Server to store: more of the page that is being published, in order."""

    session: Word
    upload: Word
    offset: Count
    length: Length


class Kept(StoreFrame, frozen=True):
    """Store to server: answer to an upload. is_kept: the page is in the store or its queue."""

    session: Word
    upload: Word
    is_kept: bool


FromServer = Probe | Seek | Fetch | Publish | Part
FromStore = Probe | Found | Piece | Gone | Kept
AnyStoreFrame = Greet | Admit | Deny | Unknown | FromServer | FromStore

_KINDS: tuple[type[AnyStoreFrame], ...] = (
    Greet,
    Admit,
    Deny,
    Unknown,
    Probe,
    Seek,
    Found,
    Fetch,
    Piece,
    Gone,
    Publish,
    Part,
    Kept,
)
STORE_WIRE: Wire[AnyStoreFrame] = Wire(b"KVPS", STORE_PROTOCOL, _KINDS, MAX_STORE_HEAD_BYTES)
