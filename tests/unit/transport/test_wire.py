"""Bytes on the wire: every frame survives encoding, and nothing else is accepted."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspec_testkit.transport.fuzz import SAMPLES, damaged_messages, forged_messages
from sglang_kvspec.transport.frames import MAX_PIECE_BYTES, PROTOCOL, Data, Open, Stream
from sglang_kvspec.transport.wire import (
    MAX_HEAD_BYTES,
    Drop,
    FrameError,
    decode,
    encode,
    seal,
)

NAMES = [type(frame).__name__ for frame, _ in SAMPLES]


@pytest.mark.parametrize(("frame", "payload"), SAMPLES, ids=NAMES)
def test_a_frame_comes_back(frame: object, payload: bytes | None) -> None:
    parts = [encode(frame, payload), *([payload] if payload else [])]  # type: ignore[arg-type]
    assert decode(parts) == (frame, payload)


@pytest.mark.parametrize(("frame", "payload"), SAMPLES, ids=NAMES)
def test_every_flipped_bit_is_found(frame: object, payload: bytes | None) -> None:
    parts = [encode(frame, payload), *([payload] if payload else [])]  # type: ignore[arg-type]
    for place, part in enumerate(parts):
        for bit in range(8 * len(part)):
            damaged = bytearray(part)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(FrameError):
                decode([*parts[:place], bytes(damaged), *parts[place + 1 :]])


def drop_of(parts: list[bytes]) -> Drop:
    with pytest.raises(FrameError) as caught:
        decode(parts)
    return caught.value.drop


def data(length: int) -> Data:
    return Data(1, 1, 1, Stream.ANCHOR, 0, 0, 0, length, 0, length)


def test_each_kind_of_damage_has_its_name() -> None:
    payload = bytes(100)
    head = encode(data(100), payload)
    assert drop_of([]) is Drop.MALFORMED
    assert drop_of([head, payload, payload]) is Drop.MALFORMED
    assert drop_of([b"HTTP/1.1 200 OK\r\n"]) is Drop.MALFORMED
    assert drop_of([head[:10], payload]) is Drop.MALFORMED
    assert drop_of([head, payload[:-1] + b"\1"]) is Drop.CHECKSUM
    assert drop_of([head]) is Drop.CHECKSUM
    assert drop_of([bytes(MAX_HEAD_BYTES + 1)]) is Drop.OVERSIZED
    assert drop_of([head, bytes(MAX_PIECE_BYTES + 1)]) is Drop.OVERSIZED
    assert drop_of([encode(data(99), payload), payload]) is Drop.MALFORMED
    assert drop_of([seal(PROTOCOL, 200, b"", None)]) is Drop.MALFORMED
    assert drop_of([seal(PROTOCOL + 1, 4, b"", None)]) is Drop.VERSION


def test_an_undamaged_hello_of_another_protocol_is_recognized() -> None:
    with pytest.raises(FrameError) as caught:
        decode([seal(PROTOCOL + 6, 0, b"whatever it says then", None)])
    assert caught.value.hello_protocol == PROTOCOL + 6
    other = bytearray(seal(PROTOCOL, 0, b"", None))
    other[4] ^= 2
    with pytest.raises(FrameError) as caught:
        decode([bytes(other)])
    assert caught.value.hello_protocol is None


def test_the_largest_open_fits() -> None:
    word, count = (1 << 63) - 1, (1 << 31) - 1
    pages = ((count, word),) * (1 << 15)
    frame = Open(word, word, word, pages, 1, count, count, 1 << 15)
    assert decode([encode(frame)])[0] == frame


def test_damaged_messages_are_never_decoded() -> None:
    for message in islice(damaged_messages(seed=1), 5000):
        drop_of(message)


def test_forged_messages_raise_nothing_but_frame_errors() -> None:
    decoded = 0
    for message in islice(forged_messages(seed=2), 5000):
        try:
            decode(message)
            decoded += 1
        except FrameError:
            pass
    # Some must be frames. Otherwise the forger only tests what the first check refuses.
    assert 0 < decoded < 1000


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_noise_is_never_decoded(parts: list[bytes]) -> None:
    drop_of(parts)
