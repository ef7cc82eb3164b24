"""Conversion of frames to messages of one or two parts, and back. FrameError for other messages.

Part 0: magic, protocol, kind, checksum (16 bytes, little endian), then the frame in msgpack. Part
1: the payload of a frame that has a length. The checksum is XXH3 with 64 bits over everything but
the magic. It finds damage; CURVE protects against forgery.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from struct import Struct as Layout
from typing import Generic, TypeVar

from msgspec import DecodeError, Struct
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

# An Open of MAX_PAGES pages with the largest ids and generations fits.
MAX_HEAD_BYTES = 1 << 19
# libzmq hangs up on a peer whose message part is larger.
MAX_PART_BYTES = max(MAX_HEAD_BYTES, MAX_PIECE_BYTES)

Buffer = bytes | bytearray | memoryview
AnyFrame = TypeVar("AnyFrame", bound=Struct)

_PREFIX = Layout("<4sHHQ")


class Drop(StrEnum):
    """Reasons to drop a frame. VERSION: of another protocol. FOREIGN: of another session, or of a
    kind that is not sent to this end. REPLAYED: its sequence was read before, or is too old to
    tell. STALE: for another generation of the page than was expected. RECYCLED: the page has a new
    generation, so its transfer fails. UNKNOWN: its transfer, lookup or upload is not expected.
    MISPLACED: outside the bounds of its transfer, lookup or upload. NO_ROOM: the destination is
    too small, so the transfer fails; or too many pages wait at a prefix server."""

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
    """Frame to drop, or a message that is no frame. hello_protocol: protocol of an undamaged
    greeting of another protocol."""

    def __init__(self, drop: Drop, detail: str, hello_protocol: int | None = None) -> None:
        super().__init__(f"{drop}: {detail}")
        self.drop = drop
        self.hello_protocol = hello_protocol


class Wire(Generic[AnyFrame]):
    """Encoder and decoder of one protocol. kinds: types of its frames in order of their numbers, a
    greeting first. Magic, prefix, checksum and the numbers of greetings and refusals never
    change, so that ends of two protocols can still refuse each other."""

    def __init__(
        self, magic: bytes, protocol: int, kinds: Sequence[type[AnyFrame]], max_head_bytes: int
    ) -> None:
        self.magic, self.protocol = magic, protocol
        self._kinds, self._max_head_bytes = tuple(kinds), max_head_bytes
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        self._decoders: list[Decoder[AnyFrame]] = [Decoder(kind) for kind in kinds]
        self._has_payload = ["length" in kind.__struct_fields__ for kind in kinds]
        self._encode = Encoder().encode

    def encode(self, frame: AnyFrame, payload: Buffer | None = None) -> bytes:
        """Return part 0 of a frame's message. The payload, if there is one, is part 1 unchanged."""
        kind = self._numbers[type(frame)]
        return self.seal(self.protocol, kind, self._encode(frame), payload)

    def seal(self, protocol: int, kind: int, body: bytes, payload: Buffer | None) -> bytes:
        """Return part 0 with its checksum, for any body."""
        checksum = _checksum(protocol, kind, body, payload)
        return _PREFIX.pack(self.magic, protocol, kind, checksum) + body

    def decode(self, parts: Sequence[Buffer]) -> tuple[AnyFrame, Buffer | None]:
        """Return the frame of a message, and its payload: part 1 itself, not a copy, or None."""
        if not 1 <= len(parts) <= 2:
            raise FrameError(Drop.MALFORMED, f"the message has {len(parts)} parts, expected 1 or 2")
        head = memoryview(parts[0])
        payload = parts[1] if len(parts) == 2 else None
        if len(head) > self._max_head_bytes:
            detail = f"the head has {len(head)} bytes, limit {self._max_head_bytes}"
            raise FrameError(Drop.OVERSIZED, detail)
        if payload is not None and len(payload) > MAX_PIECE_BYTES:
            detail = f"the payload has {len(payload)} bytes, limit {MAX_PIECE_BYTES}"
            raise FrameError(Drop.OVERSIZED, detail)
        if len(head) < _PREFIX.size:
            detail = f"the head has {len(head)} bytes, minimum {_PREFIX.size}"
            raise FrameError(Drop.MALFORMED, detail)
        magic, protocol, kind, checksum = _PREFIX.unpack_from(head)
        if magic != self.magic:
            raise FrameError(Drop.MALFORMED, f"the magic is {magic!r}, expected {self.magic!r}")
        body = head[_PREFIX.size :]
        if _checksum(protocol, kind, body, payload) != checksum:
            raise FrameError(
                Drop.CHECKSUM, f"a frame of kind {kind} with {len(body)} bytes is damaged"
            )
        if protocol != self.protocol:
            detail = f"the frame has protocol {protocol}, this end {self.protocol}"
            raise FrameError(Drop.VERSION, detail, protocol if kind == 0 else None)
        if kind >= len(self._kinds) or (payload is not None) != self._has_payload[kind]:
            raise FrameError(Drop.MALFORMED, f"no frame of kind {kind} has {len(parts)} parts")
        try:
            frame = self._decoders[kind].decode(body)
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(Drop.MALFORMED, f"{self._kinds[kind].__name__}: {error}") from None
        if payload is not None and len(payload) != frame.length:
            detail = (
                f"{type(frame).__name__} says {frame.length} bytes, its payload has {len(payload)}"
            )
            raise FrameError(Drop.MALFORMED, detail)
        return frame, payload


def _checksum(protocol: int, kind: int, body: Buffer, payload: Buffer | None) -> int:
    digest = xxh3_64_intdigest(body, seed=protocol << 16 | kind)
    return digest if payload is None else xxh3_64_intdigest(payload, seed=digest)


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
KV_WIRE: Wire[Frame] = Wire(b"KVSP", PROTOCOL, _KINDS, MAX_HEAD_BYTES)
encode, seal, decode = KV_WIRE.encode, KV_WIRE.seal, KV_WIRE.decode
