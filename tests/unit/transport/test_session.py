"""Sessions and peers: identity, silence, and how often messages are repeated."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvspec_testkit.transport.rig import IDENTITY
from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.frames import PROTOCOL, Ack, Hello, Identity, Ping, Refuse, Welcome
from sglang_kvspec.transport.handshake import mismatch
from sglang_kvspec.transport.peers import MAX_PEERS, Peers
from sglang_kvspec.transport.session import Session, Timing
from sglang_kvspec.transport.wire import Drop, FrameError

TIMING = Timing()


def test_frames_of_others_and_of_the_past_are_refused() -> None:
    session = Session(5, TIMING, 0.0)
    session.admit(Ping(5, 1), 1.0)
    for frame, drop in ((Ping(6, 2), Drop.FOREIGN), (Ping(5, 1), Drop.REPLAYED)):
        with pytest.raises(FrameError) as caught:
            session.admit(frame, 2.9)
        assert caught.value.drop is drop
    assert session.is_silent(1.0 + TIMING.silence_s)


def test_an_ack_answers_a_ping_once_and_is_not_answered() -> None:
    session = Session(5, TIMING, 0.0)
    assert session.ack(10) is None
    session.admit(Ping(5, 3), 0.0)
    assert session.ack(10) == Ack(5, 1, 3, b"\1", 3, 10)
    assert session.ack(10) is None
    session.admit(Ack(5, 4, 1, b"\1", 0, 0), 0.0)
    assert session.ack(10) is None
    assert session.ack(0, if_owed=False) == Ack(5, 2, 4, b"\3", 0, 0)


def test_an_ack_of_what_was_never_sent_is_refused() -> None:
    session = Session(5, TIMING, 0.0)
    assert session.stamp() == 1
    for frame in (Ack(5, 1, 2, b"\3", 0, 0), Ack(5, 1, 1, b"\1", 2, 0)):
        with pytest.raises(FrameError, match="last sent 1"):
            session.admit(frame, 0.0)
    session.admit(Ack(5, 1, 1, b"\1", 1, 0), 0.0)


def test_pings_keep_time() -> None:
    session = Session(5, TIMING, 0.0)
    pings = [session.ping(tick / 100, awaits_ack=False) for tick in range(301)]
    assert sum(ping is not None for ping in pings) == 6
    session = Session(5, TIMING, 0.0)
    pings = [session.ping(tick / 100, awaits_ack=True) for tick in range(301)]
    assert sum(ping is not None for ping in pings) == pytest.approx(30, abs=2)
    session = Session(5, replace(TIMING, heartbeat_s=1e9), 0.0)
    for tick in range(1, 200):
        session.admit(Ack(5, tick, 0, b"", 0, 0), tick / 100)
        assert session.ping(tick / 100 + 0.05, awaits_ack=True) is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("protocol", PROTOCOL + 1, "transport protocol"),
        ("package", "0.2.0", "versions of KV and packages"),
        ("codec", "uniform4", "--kvspec-codec"),
        ("target", "int8", "--kvspec-target"),
        ("page_size", 32, "--page-size"),
        ("fingerprint", "eval-31m", "model"),
    ],
)
def test_whatever_differs_is_named_in_one_sentence(field: str, value: object, words: str) -> None:
    other = msgspec.structs.replace(IDENTITY, **{field: value})
    reason = mismatch(IDENTITY, other)
    assert reason is not None
    assert words in reason
    assert str(value) in reason
    assert str(getattr(IDENTITY, field)) in reason
    assert "\n" not in reason


def of_size(size: int, heads: int, **changes: object) -> Identity:
    shape = {"tp_shape": (size, heads), "fingerprint": f"a part of {size}"}
    return msgspec.structs.replace(IDENTITY, **(shape | changes))


@pytest.mark.parametrize(
    ("sender", "receiver", "part"),
    [
        ((8, 1), (2, 4), (0, 1)),
        ((2, 4), (1, 8), (0, 1)),
        ((1, 8), (2, 4), (1, 2)),
        ((2, 4), (8, 1), (3, 4)),
    ],
)
def test_ends_may_have_other_numbers_of_ranks(sender, receiver, part) -> None:
    """Each rank of either end has a different part of the model."""
    assert mismatch(of_size(*sender), of_size(*receiver, part=part)) is None
    other = of_size(*receiver, part=part, whole="all of another")
    assert mismatch(of_size(*sender), other) == (
        "model must be the same on both ends: sender has all of demo-5m, receiver all of another"
    )


NO_MULTIPLE = "--tp-size of one end must be a multiple of the other's"
SHARED = "KV heads that several ranks hold cannot be sent to another --tp-size"


@pytest.mark.parametrize(
    ("sender", "receiver", "part", "words"),
    [
        ((3, 8), (2, 12), (0, 1), NO_MULTIPLE),
        ((2, 4), (0, 8), (0, 1), NO_MULTIPLE),
        # With 8 heads and 16 ranks, each head is on two ranks.
        ((16, 1), (8, 1), (0, 1), SHARED),
        ((8, 1), (16, 1), (0, 2), SHARED),
        ((2, 4), (2, 8), (0, 1), SHARED),
        *(
            ((1, 8), (2, 4), part, "a receiver cannot have part {} of {} of the sender's KV heads")
            for part in ((0, 1), (2, 2), (0, 4), (0, 0))
        ),
        ((2, 4), (1, 8), (0, 2), "a receiver cannot have part {} of {} of the sender's KV heads"),
    ],
)
def test_servers_of_sizes_that_do_not_fit_are_told_both(sender, receiver, part, words) -> None:
    """The reason names both sizes, not that each rank has another part of the model."""
    assert mismatch(of_size(*sender), of_size(*receiver, part=part)) == (
        f"{words.format(*part)}: sender has {sender[0]} ({sender[1]} KV heads per rank), "
        f"receiver {receiver[0]} ({receiver[1]} KV heads per rank)"
    )


def test_a_sender_is_the_rank_that_it_is_taken_for() -> None:
    wrong = "tensor-parallel rank must be the same on both ends: sender has 1, receiver 0"
    for size, heads in ((2, 4), (1, 8)):
        assert mismatch(of_size(2, 4, rank=1), of_size(size, heads)) == wrong


def test_equal_ends_may_talk() -> None:
    assert mismatch(IDENTITY, IDENTITY) is None
    assert IDENTITY.protocol == PROTOCOL


def make_peers() -> Peers:
    return Peers(IDENTITY, TIMING, LinkCounters())


def test_a_repeated_hello_keeps_its_session_and_a_new_one_does_not() -> None:
    peers = make_peers()
    first = peers.greet(b"r", Hello(1, IDENTITY, 0), 0.0)
    again = peers.greet(b"r", Hello(1, IDENTITY, 0), 0.1)
    other = peers.greet(b"r", Hello(2, IDENTITY, 0), 0.2)
    assert isinstance(first.answer, Welcome)
    assert isinstance(other.answer, Welcome)
    assert (first.is_new, again.is_new, other.is_new) == (True, False, True)
    assert first.answer == again.answer
    assert first.answer.session != other.answer.session


def test_peers_are_bounded() -> None:
    peers = make_peers()
    for number in range(MAX_PEERS):
        peers.greet(b"%d" % number, Hello(1, IDENTITY, 0), 0.0)
    assert isinstance(peers.greet(b"more", Hello(1, IDENTITY, 0), 0.0).answer, Refuse)
    assert isinstance(peers.greet(b"7", Hello(9, IDENTITY, 0), 0.0).answer, Welcome)


def test_a_silent_peer_may_come_back_until_it_is_gone() -> None:
    peers = make_peers()
    peers.greet(b"r", Hello(1, IDENTITY, 0), 0.0)
    assert peers.silence(TIMING.silence_s - 0.01) == []
    assert peers.silence(TIMING.silence_s) == [b"r"]
    assert peers.silence(TIMING.silence_s) == []
    assert peers.forget_gone(TIMING.gone_s - 0.01) == []
    assert peers.greet(b"r", Hello(1, IDENTITY, 0), TIMING.gone_s - 0.01).is_new
    assert peers.forget_gone(TIMING.gone_s) == []
    later_s = 2 * TIMING.gone_s
    assert peers.silence(later_s) == [b"r"]
    assert peers.forget_gone(later_s) == [(b"r", pytest.approx(TIMING.gone_s + 0.01))]
    assert peers.session(b"r") is None
    assert peers.forget_gone(later_s) == []
