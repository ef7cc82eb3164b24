"""Fuzzing with messages that no honest end sends: of the decoder, and of a live port."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import zmq

from kvspec_testkit.transport.fuzz import damaged_messages, forged_messages
from kvspec_testkit.transport.loopback import LoopbackLink
from sglang_kvspec.transport.wire import FrameError, decode


@dataclass(frozen=True, slots=True)
class FuzzReport:
    """Result of fuzzing the decoder. decoded: damaged messages that passed for frames.
    leaked_bytes: growth of Python's memory from the first tenth of the messages to the end."""

    inputs: int
    decoded: int
    leaked_bytes: int


def fuzz_decoder(count: int, seed: int) -> FuzzReport:
    """Decode damaged messages, which must all be refused, and as many forged messages. Forged
    messages have a right checksum, and may at most be frames of an unknown session. Raises any
    error of the decoder but FrameError."""
    tracemalloc.start()
    decoded, before = 0, 0
    pairs = zip(damaged_messages(seed), forged_messages(seed + 1), strict=False)
    for number, (damaged, forged) in enumerate(islice(pairs, count // 2)):
        decoded += _is_decoded(damaged)
        _is_decoded(forged)
        if number == count // 20:
            before = tracemalloc.get_traced_memory()[0]
    leaked = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return FuzzReport(2 * (count // 2), decoded, leaked)


def fuzz_port(count: int, seed: int) -> int:
    """Send both kinds of messages from a stranger's socket to a sender that serves a transfer.
    Raises if the transfer suffers. Return the number of frames that the sender dropped."""
    link = LoopbackLink()
    context = zmq.Context()
    try:
        address = link.listen()
        link.dial(address)
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.sndtimeo = 5000
        stranger.connect(address)
        link.start()
        sender = link.sender
        assert sender is not None
        messages = _alternating(seed)
        for number, message in enumerate(islice(messages, count)):
            stranger.send_multipart(message)
            if number % 20 == 0:
                link.turn()
        link.complete()
        link.until(lambda: sender.counters.dropped.total() >= count - count // 100)
        assert sender.counters.sessions == 1
        return sender.counters.dropped.total()
    finally:
        link.close()
        context.destroy(linger=0)


def _alternating(seed: int) -> Iterator[list[bytes]]:
    for damaged, forged in zip(damaged_messages(seed), forged_messages(seed + 1), strict=False):
        yield damaged
        yield forged


def _is_decoded(message: list[bytes]) -> bool:
    try:
        decode(message)
    except FrameError:
        return False
    return True
