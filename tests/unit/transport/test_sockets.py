"""Both ends on real sockets of the loopback interface, with faults of connections and peers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
import zmq

from kvspec_testkit.transport.loopback import ANY, ORDER, LoopbackLink
from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport import (
    CurveKeys,
    LinkState,
    SegmentReleased,
    Stream,
    StreamArrived,
    TransferEnded,
    ZmqPort,
)

# Longer than the time limit of a test.
NEVER_S = 3600.0
NUM_WAKES = 200


@pytest.fixture
def link() -> Iterator[LoopbackLink]:
    link = LoopbackLink()
    yield link
    link.close()


def test_a_transfer_over_tcp(link: LoopbackLink) -> None:
    link.dial(link.listen())
    link.start()
    link.complete()
    released = [e.key for e in link.sent if isinstance(e, SegmentReleased)]
    assert len(released) == len(set(released)) == 16
    last = link.sent[-1]
    assert isinstance(last, TransferEnded)
    kinds = [e.stream for e in link.arrived if isinstance(e, StreamArrived)]
    assert kinds == [Stream.ANCHOR, Stream.RESIDUAL]


def test_memory_that_changes_after_its_release_harms_no_transfer(link: LoopbackLink) -> None:
    link.dial(link.listen())
    expected = [[t.clone() for t in stream] for stream in link.source.tensors]
    link.start()
    while not link.has_ended(None):
        before = len(link.sent)
        link.turn()
        for event in link.sent[before:]:
            if isinstance(event, SegmentReleased):
                link.source.poison(event.key.stream, event.key.page_index, event.key.chunk)
    link.until(lambda: link.has_all(Stream.RESIDUAL))
    for stream in Stream:
        for chunk, tensor in enumerate(expected[stream]):
            assert torch.equal(link.target.tensors[stream][chunk][ORDER], tensor)
    assert link.receiver is not None
    assert not link.receiver.counters.dropped


def test_a_connection_cut_in_the_middle_of_frames(link: LoopbackLink) -> None:
    proxy = link.proxy(link.listen())
    link.dial(proxy.address)
    link.start()
    # After the anchors no more than 1 MB is under way, so that each step needs a new connection.
    goal = 2_600_000
    for _ in range(3):
        link.until(lambda goal=goal: link.received_bytes() > goal)  # type: ignore[misc]
        proxy.cut()
        goal = link.received_bytes() + 1_500_000
    link.complete()
    assert proxy.num_connections >= 4


def test_damaged_bytes_on_the_way(link: LoopbackLink) -> None:
    """About every twentieth frame is damaged."""
    proxy = link.proxy(link.listen(), damage_every=5_000_000)
    link.dial(proxy.address)
    link.start()
    link.complete()
    assert proxy.num_damaged


def test_a_path_that_takes_nothing_holds_no_more_than_credit(link: LoopbackLink) -> None:
    proxy = link.proxy(link.listen())
    link.dial(proxy.address)
    link.start()
    link.until(lambda: link.received_bytes() > 1_000_000)
    proxy.flows.clear()
    assert link.sender is not None
    sender = link.sender
    link.until(lambda: sender.counters.lost_sessions > 0)
    sent = sum(c.payload_bytes for c in sender.counters.streams.values())
    assert sent - link.received_bytes() <= sender.scheduler.limits.total_bytes
    proxy.flows.set()
    link.complete()


def test_a_sender_that_dies_and_listens_again(link: LoopbackLink) -> None:
    address = link.listen()
    link.dial(address)
    link.start()
    link.until(lambda: link.received_bytes() > 2_000_000)
    link.close_sender()
    link.until(lambda: link.receiver is not None and link.receiver.state is LinkState.GREETING)
    link.listen(address)
    link.offer()
    link.complete()


def test_a_sender_that_stays_away_fails_the_transfer(link: LoopbackLink) -> None:
    link.dial(link.listen())
    link.start()
    link.until(lambda: link.received_bytes() > 2_000_000)
    link.close_sender()
    link.until(lambda: link.has_failed("the sender was silent for"))


def test_a_receiver_that_dies_frees_the_sender(link: LoopbackLink) -> None:
    link.dial(link.listen())
    link.start()
    link.until(lambda: link.received_bytes() > 2_000_000)
    link.close_receiver()
    link.until(lambda: link.has_ended("the receiver was silent for"))
    assert link.sender is not None
    assert link.sender.is_idle


def test_a_receiver_that_dials_again_gets_its_next_transfer(link: LoopbackLink) -> None:
    address = link.listen()
    link.dial(address)
    link.until(lambda: link.receiver is not None and link.receiver.state is LinkState.LIVE)
    link.close_receiver()
    link.dial(address)
    link.start()
    link.complete()


def test_noise_on_the_port(link: LoopbackLink) -> None:
    address = link.listen()
    host, port = address.removeprefix("tcp://").split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 70_000):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
    link.dial(address)
    link.start()
    link.complete()


def test_strangers_that_speak_zmq(link: LoopbackLink) -> None:
    address = link.listen()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    link.closers += [context.term, stranger.close]
    stranger.linger = 0
    stranger.connect(address)
    stranger.send_multipart([b"hello"] * 50)
    stranger.send(bytes(3 << 20))
    link.dial(address)
    link.start()
    link.complete()
    # On a busy machine the stranger may connect behind the transfer.
    link.until(lambda: link.sender is not None and link.sender.counters.dropped.total() >= 1)


def curve_keys() -> tuple[bytes, bytes]:
    public, secret = zmq.curve_keypair()
    return public, secret


def keys_of(own: tuple[bytes, bytes], *peers: tuple[bytes, bytes]) -> CurveKeys:
    return CurveKeys(own[0], own[1], frozenset(public for public, _ in peers))


def test_no_more_parts_of_a_message_are_kept_than_it_takes_to_refuse_it(link: LoopbackLink) -> None:
    port = ZmqPort("tcp://127.0.0.1:0", bind=True)
    stranger = ZmqPort(port.address, bind=False)
    link.closers += [port.close, stranger.close]
    stranger._socket.send_multipart([b"part"] * 1000)
    stranger.send(b"", b"next")
    port.wait(10)
    port.wait(10)
    received = port.receive()
    assert received is not None
    assert [bytes(part) for part in received[1]] == [b"part"] * 3
    link.until(lambda: (message := port.receive()) is not None and bytes(message[1][0]) == b"next")


def test_a_transfer_under_curve(link: LoopbackLink) -> None:
    here, there = curve_keys(), curve_keys()
    link.dial(link.listen(keys=keys_of(here, there)), keys_of(there, here))
    link.start()
    link.complete()


@pytest.mark.parametrize("wrong", ["receiver", "sender", "none at the receiver", "none at sender"])
def test_wrong_keys_get_nothing(link: LoopbackLink, wrong: str) -> None:
    here, there, other = curve_keys(), curve_keys(), curve_keys()
    listening: CurveKeys | None = keys_of(here, there)
    dialling: CurveKeys | None = keys_of(there, here)
    if wrong == "receiver":
        dialling = keys_of(other, here)
    elif wrong == "sender":
        dialling = keys_of(there, other)
    elif wrong == "none at the receiver":
        dialling = None
    else:
        listening = None
    link.dial(link.listen(keys=listening), dialling)
    link.start()
    link.until(lambda: link.has_failed("silent"))
    assert link.sender is not None
    assert link.sender.counters.sessions == 0
    assert link.received_bytes() == 0


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.1.2.3:4", "tcp://example.org:1"]
)
@pytest.mark.parametrize("bind", [True, False])
def test_off_this_machine_only_with_keys(address: str, bind: bool) -> None:
    with pytest.raises(TransportError, match="CURVE keys"):
        ZmqPort(address, bind=bind)


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "127.0.0.1:5", "tcp://", "udp://127.0.0.1:1"])
def test_only_tcp(address: str) -> None:
    with pytest.raises(TransportError, match="expected tcp://"):
        ZmqPort(address, bind=True)


def test_memory_is_lent_until_zmq_has_sent_it(link: LoopbackLink) -> None:
    port = ZmqPort(ANY, bind=True)
    peer = ZmqPort(port.address, bind=False, identity=b"peer")
    link.closers += [port.close, peer.close]
    link.until(lambda: peer.send(b"", b"here I am") is not None)
    link.until(lambda: port.receive() is not None)
    memory = memoryview(bytearray(1 << 20))
    holds = [port.send(b"peer", b"head", memory) for _ in range(160)]
    assert not any(hold is None for hold in holds)
    # The peer does not read, and this is more than ZMQ and the kernel buffer at both ends.
    assert not holds[-1].done
    link.until(lambda: peer.receive() is None and holds[-1].done)
    assert all(hold.done for hold in holds)


def test_a_port_in_use_is_named(link: LoopbackLink) -> None:
    address = link.listen()
    with pytest.raises(TransportError, match="in use"):
        ZmqPort(address, bind=True)


def test_keys_are_checked_and_not_shown() -> None:
    public, secret = curve_keys()
    assert secret.decode() not in repr(CurveKeys(public, secret, frozenset({public})))
    with pytest.raises(TransportError, match="40 characters"):
        CurveKeys(public, b"short", frozenset({public}))
    with pytest.raises(TransportError, match="at least one peer"):
        CurveKeys(public, secret, frozenset())


def test_wakes_end_one_wait(link: LoopbackLink) -> None:
    port = ZmqPort(ANY, bind=True)
    peer = ZmqPort(port.address, bind=False)
    link.closers += [port.close, peer.close]
    port.wake()
    port.wake()
    assert not port.wait(NEVER_S)
    # A leftover wake would end this wait, too, and make it False.
    link.until(lambda: peer.send(b"", b"message") is not None)
    assert port.wait(NEVER_S)


def test_a_wake_ends_a_wait_that_has_begun() -> None:
    """Some wakes come after the start of a wait, others before it.

    A wait that no wake ends runs into the time limit of the test.
    """
    port = ZmqPort(ANY, bind=True)
    turns, ends = threading.Semaphore(0), threading.Semaphore(0)

    def wait() -> None:
        for _ in range(NUM_WAKES):
            turns.release()
            assert not port.wait(NEVER_S)
            ends.release()

    waiter = threading.Thread(target=wait)
    waiter.start()
    for _ in range(NUM_WAKES):
        turns.acquire()
        port.wake()
        ends.acquire()
    waiter.join()
    port.close()


def test_a_wait_that_ends_for_a_message_says_so(link: LoopbackLink) -> None:
    port = ZmqPort(ANY, bind=True)
    peer = ZmqPort(port.address, bind=False)
    link.closers += [port.close, peer.close]
    link.until(lambda: peer.send(b"", b"message") is not None)
    assert port.wait(30)
    port.wake()
    assert not port.wait(30), "a call is waiting, too"


def test_unnoticed_wakes_block_no_caller() -> None:
    port = ZmqPort(ANY, bind=True)
    for _ in range(5000):
        port.wake()
    port.wait(30)
    port.close()
