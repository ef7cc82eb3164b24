"""Damaged and forged messages, which no correct sender or receiver sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from msgspec.msgpack import encode as pack

from kvspec_testkit.transport.rig import IDENTITY
from sglang_kvspec.transport.frames import (
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
    Stream,
    Welcome,
)
from sglang_kvspec.transport.wire import encode, seal

SAMPLES: tuple[tuple[Frame, bytes | None], ...] = (
    (Hello(1, IDENTITY, 4 << 20), None),
    (Welcome(1, 2), None),
    (Refuse(1, "no"), None),
    (Bye(2), None),
    (Ping(2, 3), None),
    (Ack(2, 3, 40, b"\xff\x07", 9, 4 << 20), None),
    (Open(2, 3, 7, ((5, 1), (6, 2)), 3, 130, 470, 1), None),
    (Accept(2, 3, 7), None),
    (Abort(2, 3, 7, "gone"), None),
    (Data(2, 3, 7, Stream.RESIDUAL, 5, 1, 2, 300, 200, 100), bytes(range(100))),
)


def damaged_messages(seed: int) -> Iterator[list[bytes]]:
    """Yield endless messages that differ from those of all frames. Damages are flipped bits; cut,
    doubled or inserted bytes; swapped, lost or added parts; tails of other frames; and noise. A
    decoder must refuse every message."""
    random = Random(seed)
    originals = [
        [encode(frame, payload), *([payload] if payload else [])] for frame, payload in SAMPLES
    ]
    while True:
        parts = [bytearray(part) for part in random.choice(originals)]
        for _ in range(random.choice((1, 1, 1, 2, 5))):
            parts = random.choice(_DAMAGES)(random, parts, originals)
        message = [bytes(part) for part in parts]
        if message not in originals:
            yield message


def forged_messages(seed: int) -> Iterator[list[bytes]]:
    """Yield endless messages with a right checksum and a body of noise in msgpack."""
    random = Random(seed)
    while True:
        body = [noise_value(random, 0) for _ in range(random.randrange(12))]
        payload = random.randbytes(random.randrange(1, 300)) if random.random() < 0.4 else None
        kind = random.randrange(12)
        head = seal(
            PROTOCOL, kind, pack(body) + random.randbytes(random.choice((0, 0, 3))), payload
        )
        yield [head, *([payload] if payload else [])]


_Parts = list[bytearray]
_Damage = Callable[[Random, _Parts, list[list[bytes]]], _Parts]


def _flip(random: Random, parts: _Parts, _: list[list[bytes]]) -> _Parts:
    part = random.choice(parts)
    if part:
        part[random.randrange(len(part))] ^= 1 << random.randrange(8)
    return parts


def _cut_out(random: Random, parts: _Parts, _: list[list[bytes]]) -> _Parts:
    part = random.choice(parts)
    start = random.randrange(len(part) + 1)
    del part[start : start + random.randint(1, 40)]
    return parts


def _double(random: Random, parts: _Parts, _: list[list[bytes]]) -> _Parts:
    part = random.choice(parts)
    start = random.randrange(len(part) + 1)
    part[start:start] = part[start : start + 20] or b"\0"
    return parts


def _put_in(random: Random, parts: _Parts, _: list[list[bytes]]) -> _Parts:
    part = random.choice(parts)
    start = random.randrange(len(part) + 1)
    part[start:start] = random.randbytes(random.randint(1, 64))
    return parts


def _graft(random: Random, parts: _Parts, originals: list[list[bytes]]) -> _Parts:
    other = random.choice(originals)[0]
    cut = random.randint(1, min(len(parts[0]), len(other)) or 1)
    parts[0][cut:] = other[cut:]
    return parts


def _rearrange(random: Random, parts: _Parts, _: list[list[bytes]]) -> _Parts:
    kind = random.randrange(3)
    if kind == 0:
        return parts[::-1]
    if kind == 1:
        return [*parts, bytearray(random.randbytes(random.randrange(20)))]
    return parts[:-1] or [bytearray()]


def _noise(random: Random, parts: _Parts, _: list[list[bytes]]) -> _Parts:
    return [bytearray(random.randbytes(random.randrange(200))) for _ in parts]


_DAMAGES: tuple[_Damage, ...] = (
    _flip,
    _flip,
    _cut_out,
    _double,
    _put_in,
    _graft,
    _rearrange,
    _noise,
)


def noise_value(random: Random, depth: int) -> object:
    kind = random.randrange(10 if depth < 3 else 7)
    if kind < 4:
        return random.choice((0, 1, 2, 3, 7, 5, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -1, 130))
    if kind == 4:
        return random.randbytes(random.randrange(200))
    if kind == 5:
        return "x" * random.randrange(600)
    if kind == 6:
        return random.choice((None, True, 1.5, float("nan")))
    return [noise_value(random, depth + 1) for _ in range(random.randrange(4))]
