"""Frames of the KV transport, typed and bounded. wire.py converts them to bytes."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct

PROTOCOL = 3
MAX_PIECE_BYTES = 1 << 20
MAX_PAGES = 1 << 15
MAX_CHUNKS = 1 << 12
# Sequences that an Ack covers and that a ReplayWindow remembers: far more than the frames that a
# sender may have in flight.
ACK_SPAN = 1024


class Stream(IntEnum):
    """The two streams of a transfer, by priority (Lynx section 4.2)."""

    ANCHOR = 0
    RESIDUAL = 1


# For loops that run for each piece: iterating over this tuple is faster than over the enum.
STREAMS = tuple(Stream)

Word = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Reason = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(max_length=256)]


class _Frame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Identity(_Frame, frozen=True):
    """Properties of an end that the two ends compare before any KV crosses.

    tp_shape: (tensor-parallel ranks, KV heads of a rank). rank: the sender's, or the one that a
    receiver takes the sender for. part: (index, count): a receiver has share `index` of `count`
    equal shares of the sender's KV heads. fingerprint: names the model and the weights of a rank.
    whole: names the model and the weights of all ranks together, independent of their number.
    """

    protocol: Count
    package: Name
    codec: Name
    target: Name
    page_size: Count
    fingerprint: Name
    whole: Name
    tp_shape: tuple[Count, Count]
    rank: Count
    part: tuple[Count, Count] = (0, 1)


class Hello(_Frame, frozen=True):
    """Receiver to sender: first frame of a connection, repeated until answered."""

    nonce: Word
    identity: Identity
    credit_bytes: Count


class Welcome(_Frame, frozen=True):
    """Sender to receiver: the answer to the Hello of `nonce`. Later frames carry `session`."""

    nonce: Word
    session: Word


class Refuse(_Frame, frozen=True):
    """The answer to a Hello that cannot be served; nonce 0 if the Hello could not be read."""

    nonce: Word
    reason: Reason


class Bye(_Frame, frozen=True):
    """The answer to a frame of a session that the sender does not know: greet again."""

    session: Word


class Ping(_Frame, frozen=True):
    session: Word
    sequence: Word


class Ack(_Frame, frozen=True):
    """Either end to the other: sequences that were read. highest: the highest of them. seen: bit i,
    little endian, is set if sequence highest - i was read. echo: sequence of the Ping that this Ack
    answers, else 0. credit_bytes: bytes that a receiver allows in flight; a sender says 0."""

    session: Word
    sequence: Word
    highest: Word
    seen: Annotated[bytes, Meta(max_length=ACK_SPAN // 8)]
    echo: Word
    credit_bytes: Count


class Open(_Frame, frozen=True):
    """Receiver to sender: request for a transfer into `pages`, each (page, generation). A repeated
    Open is safe and asks whether the transfer still exists. anchor_bytes, residual_bytes: largest
    chunk of a page. Only the first num_residual_pages pages have residuals."""

    session: Word
    sequence: Word
    transfer: Word
    pages: Annotated[tuple[tuple[Count, Word], ...], Meta(min_length=1, max_length=MAX_PAGES)]
    num_chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
    anchor_bytes: Count
    residual_bytes: Count
    num_residual_pages: Annotated[int, Meta(ge=0, le=MAX_PAGES)]


class Accept(_Frame, frozen=True):
    """Sender to receiver: the Open is accepted; data follows as it is offered."""

    session: Word
    sequence: Word
    transfer: Word


class Abort(_Frame, frozen=True):
    """Either end to the other: this transfer has ended incomplete."""

    session: Word
    sequence: Word
    transfer: Word
    reason: Reason


class Data(_Frame, frozen=True):
    """Sender to receiver: `length` bytes of a chunk of a page, from `offset` on; the payload is the
    message's second part. size: bytes of the whole chunk, the same in all its pieces. A piece
    that is sent again has a new sequence and the same place."""

    session: Word
    sequence: Word
    transfer: Word
    stream: Stream
    page: Count
    generation: Word
    chunk: Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]
    size: Annotated[int, Meta(ge=1, lt=1 << 31)]
    offset: Count
    length: Annotated[int, Meta(ge=1, le=MAX_PIECE_BYTES)]


SessionFrame = Ping | Ack | Open | Accept | Abort | Data
Frame = Hello | Welcome | Refuse | Bye | SessionFrame
