"""Every frame that may cross the wire, typed and bounded. How they become bytes: wire.py."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct

PROTOCOL = 3
MAX_PIECE_BYTES = 1 << 20
MAX_PAGES = 1 << 15
MAX_CHUNKS = 1 << 12
# Sequences that an Ack speaks of, and that a replay is told apart within; far above the frames that
# a sender may have in flight.
ACK_SPAN = 1024


class Stream(IntEnum):
    """The two streams of a transfer, by priority (Lynx section 4.2)."""

    ANCHOR = 0
    RESIDUAL = 1


# An enum makes its members anew for each loop over it; this is for loops that run for each piece.
STREAMS = tuple(Stream)

Word = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Reason = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(max_length=256)]


class _Frame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Identity(_Frame, frozen=True):
    """What two ends must agree on before a byte of KV crosses. tp_shape is (tensor-parallel ranks,
    KV heads of a rank); rank is the sender's, or which one a receiver takes it for; part is which
    of how many equal shares of the sender's KV heads a receiver has. `fingerprint` names the model
    and the weights of a rank; `whole` names the model and the weights of all ranks together, alike
    however many they are."""

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
    """The answer to a Hello that cannot be served; nonce 0 where the Hello could not be read."""

    nonce: Word
    reason: Reason


class Bye(_Frame, frozen=True):
    """The answer to a Ping of a session that this end does not know: greet again."""

    session: Word


class Ping(_Frame, frozen=True):
    session: Word
    sequence: Word


class Ack(_Frame, frozen=True):
    """What has been read: `highest` is the highest sequence, bit i of `seen` (little endian) is
    sequence highest - i. echo: sequence of the Ping that this answers, else 0. credit_bytes: what
    the receiver of data lets be in flight; a sender of data says 0."""

    session: Word
    sequence: Word
    highest: Word
    seen: Annotated[bytes, Meta(max_length=ACK_SPAN // 8)]
    echo: Word
    credit_bytes: Count


class Open(_Frame, frozen=True):
    """Receiver to sender: send this transfer into these (page, generation). Repeating it is safe
    and asks whether the transfer still lives. *_bytes: the most that one chunk of one page has.
    Only the first num_residual_pages have residuals."""

    session: Word
    sequence: Word
    transfer: Word
    pages: Annotated[tuple[tuple[Count, Word], ...], Meta(min_length=1, max_length=MAX_PAGES)]
    num_chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
    anchor_bytes: Count
    residual_bytes: Count
    num_residual_pages: Annotated[int, Meta(ge=0, le=MAX_PAGES)]


class Accept(_Frame, frozen=True):
    """Sender to receiver: the Open was understood; data follows as it is offered."""

    session: Word
    sequence: Word
    transfer: Word


class Abort(_Frame, frozen=True):
    """Either way: this transfer is over without being complete."""

    session: Word
    sequence: Word
    transfer: Word
    reason: Reason


class Data(_Frame, frozen=True):
    """Sender to receiver: `length` bytes of a chunk of a page, from `offset` on; the payload is the
    message's second part. size: of the whole chunk, the same in all its pieces. A piece that is
    sent again has a new sequence and the same place."""

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
