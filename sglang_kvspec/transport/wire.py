"""Frames to messages of one or two parts and back. Whatever is not a frame raises FrameError.

Part 0: magic, protocol, kind, checksum (16 bytes, little endian), then the frame in msgpack. Part
1: the payload, of Data alone. The checksum is XXH3 with 64 bits over everything but the magic: it
finds damage, a forger is CURVE's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from struct import Struct as Layout

from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder
from xxhash import xxh3_64_intdigest

from sglang_kvspec.transport.frames import (
    MAX_PIECE_BYTES,
    PROTOCOL,
    Abort,
    Accept,
    Ack,
    Bye,
    Data,
    Frame,
    Hello,
    Open,
    Ping,
    Refuse,
    Welcome,
)

MAGIC = b"KVSP"
# An Open of MAX_PAGES pages with the largest ids and generations fits.
MAX_HEAD_BYTES = 1 << 19
# libzmq hangs up on a peer whose message part is larger.
MAX_PART_BYTES = max(MAX_HEAD_BYTES, MAX_PIECE_BYTES)

Buffer = bytes | bytearray | memoryview

_PREFIX = Layout("<4sHHQ")
# Magic, prefix, checksum and the numbers of Hello and Refuse never change, so that ends of two
# protocols can still tell each other so.
_KINDS: tuple[type[Frame], ...] = (
    Hello,
    Welcome,
    Refuse,
    Bye,
    Ping,
    Ack,
    Open,
    Accept,
    Abort,
    Data,
)
_NUMBERS = {frame_type: number for number, frame_type in enumerate(_KINDS)}
_DECODERS: tuple[Decoder[Frame], ...] = tuple(Decoder(frame_type) for frame_type in _KINDS)
_encode = Encoder().encode


class Drop(StrEnum):
    """Why a frame was thrown away. VERSION: of another protocol. FOREIGN: of another session, or of
    a kind that this end is not sent. REPLAYED: a sequence seen before, or too old to tell. STALE:
    for another generation of the page. RECYCLED: the page was given away, so its transfer fails.
    UNKNOWN: a transfer that is not expected. MISPLACED: outside what the transfer was to hold.
    NO_ROOM: the destination has less room than it was to have, so the transfer fails."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    CHECKSUM = "checksum"
    VERSION = "version"
    FOREIGN = "foreign"
    REPLAYED = "replayed"
    STALE = "stale"
    RECYCLED = "recycled"
    UNKNOWN = "unknown"
    MISPLACED = "misplaced"
    NO_ROOM = "no room"


class FrameError(Exception):
    """A message that must not be believed. hello_protocol: what an undamaged Hello of another
    protocol speaks."""

    def __init__(self, drop: Drop, detail: str, hello_protocol: int | None = None) -> None:
        super().__init__(f"{drop}: {detail}")
        self.drop = drop
        self.hello_protocol = hello_protocol


def encode(frame: Frame, payload: Buffer | None = None) -> bytes:
    """Part 0 of a frame's message; `payload`, of Data alone, becomes part 1 as it is."""
    return seal(PROTOCOL, _NUMBERS[type(frame)], _encode(frame), payload)


def seal(protocol: int, kind: int, body: bytes, payload: Buffer | None) -> bytes:
    """Part 0 with the checksum that fits, whatever the body is."""
    return _PREFIX.pack(MAGIC, protocol, kind, _checksum(protocol, kind, body, payload)) + body


def decode(parts: Sequence[Buffer]) -> tuple[Frame, Buffer | None]:
    """The frame of a message and, for Data, its payload: a view of the part, not a copy."""
    if not 1 <= len(parts) <= 2:
        raise FrameError(Drop.MALFORMED, f"{len(parts)} parts, expected 1 or 2")
    head = memoryview(parts[0])
    payload = parts[1] if len(parts) == 2 else None
    if len(head) > MAX_HEAD_BYTES:
        raise FrameError(Drop.OVERSIZED, f"head of {len(head)} bytes, limit {MAX_HEAD_BYTES}")
    if payload is not None and len(payload) > MAX_PIECE_BYTES:
        raise FrameError(Drop.OVERSIZED, f"payload of {len(payload)}, limit {MAX_PIECE_BYTES}")
    if len(head) < _PREFIX.size:
        raise FrameError(Drop.MALFORMED, f"head of {len(head)} bytes, least {_PREFIX.size}")
    magic, protocol, kind, checksum = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        raise FrameError(Drop.MALFORMED, f"magic {magic!r}")
    body = head[_PREFIX.size :]
    if _checksum(protocol, kind, body, payload) != checksum:
        raise FrameError(Drop.CHECKSUM, f"kind {kind}, {len(body)} bytes")
    if protocol != PROTOCOL:
        detail = f"protocol {protocol}, this end {PROTOCOL}"
        raise FrameError(Drop.VERSION, detail, protocol if kind == _NUMBERS[Hello] else None)
    if kind >= len(_KINDS) or (payload is not None) != (_KINDS[kind] is Data):
        raise FrameError(Drop.MALFORMED, f"kind {kind} in {len(parts)} parts")
    try:
        frame = _DECODERS[kind].decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(Drop.MALFORMED, f"{_KINDS[kind].__name__}: {error}") from None
    if isinstance(frame, Data) and len(payload or b"") != frame.length:
        raise FrameError(Drop.MALFORMED, f"{len(payload or b'')} bytes, said {frame.length}")
    return frame, payload


def _checksum(protocol: int, kind: int, body: Buffer, payload: Buffer | None) -> int:
    digest = xxh3_64_intdigest(body, seed=protocol << 16 | kind)
    return digest if payload is None else xxh3_64_intdigest(payload, seed=digest)
