"""Messages of a hostile program to the port of a prefix server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import islice
from random import Random
from urllib.parse import urlsplit

import zmq
from msgspec.msgpack import encode as pack

from kvspec_testkit.transport.fuzz import damaged_messages, forged_messages, noise_value
from sglang_kvspec.transport.prefixes.frames import STORE_PROTOCOL
from sglang_kvspec.transport.wire import seal

# Messages on one connection, before the next one is opened.
BURST = 50
CLOSE_MS = 200
_LINES = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300, b"\x00" * 64, b"ZMTP", b"\xff\x00\x00\x00")


def attack_store(address: str, num_messages: int, seed: int) -> None:
    """Send messages that no honest server sends: noise, damaged frames, and frames with a right
    checksum and a wrong body. Between bursts, send bytes that are not ZMQ's. Read nothing back."""
    random = Random(seed)
    sources = (_noise(random), _forged(random), damaged_messages(seed), forged_messages(seed))
    context = zmq.Context.instance()
    for first in range(0, num_messages, BURST):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = CLOSE_MS
        dealer.connect(address)
        for message in islice(sources[first // BURST % len(sources)], BURST):
            dealer.send_multipart(message)
        dealer.close()
        _send_bytes(address, random)


def _noise(random: Random) -> Iterator[list[bytes]]:
    while True:
        yield [random.randbytes(random.randrange(400)) for _ in range(random.randint(1, 5))]


def _forged(random: Random) -> Iterator[list[bytes]]:
    """Yield frames of the prefix server's own protocol with a body of noise."""
    while True:
        body = pack([noise_value(random, 0) for _ in range(random.randrange(8))])
        yield [seal(STORE_PROTOCOL, random.randrange(16), body, None)]


def _send_bytes(address: str, random: Random) -> None:
    parts = urlsplit(address)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 0), timeout=5) as connection:
        connection.sendall(random.choice((*_LINES, random.randbytes(2000))))
