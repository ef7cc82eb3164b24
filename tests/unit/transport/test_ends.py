"""How one end reacts to frames from the other end, and to their absence."""

from __future__ import annotations

import pytest

from kvspec_testkit.transport.network import SENDER, Faults, NetworkPort
from kvspec_testkit.transport.rig import Rig
from sglang_kvspec.transport import (
    LinkState,
    SegmentKey,
    SegmentReleased,
    Stream,
    TransferEnded,
    TransferShape,
)
from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.frames import Data, Refuse, Welcome
from sglang_kvspec.transport.holds import Holds
from sglang_kvspec.transport.segments import Segment
from sglang_kvspec.transport.wire import Drop, decode, encode


def live_rig() -> Rig:
    """Return a rig in the middle of one transfer."""
    rig = Rig(0)
    rig.expect(1)
    rig.offer(1)
    for _ in range(6):
        rig.tick()
    assert rig.receiver.state is LinkState.LIVE
    return rig


def ended(rig: Rig) -> dict[int, str | None]:
    return {e.transfer: e.reason for e in rig.sent if isinstance(e, TransferEnded)}


def ticks(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.tick()


class Hold:
    def __init__(self) -> None:
        self.done = False


class BusyPort(NetworkPort):
    """A port where a useless message comes every 10 ms. A call wakes wait number wake_at."""

    num_waits, wake_at = 0, 0

    def wait(self, timeout_s: float) -> bool:
        self.num_waits += 1
        self._network.clock.now_s += 0.01
        return self.num_waits != self.wake_at


@pytest.mark.parametrize(("wake_at", "num_waits"), [(0, 10), (3, 3)])
@pytest.mark.parametrize("name", [SENDER, b"receiver"])
def test_a_step_ends_in_time_or_for_a_call_however_many_messages_come(
    name: bytes, wake_at: int, num_waits: int
) -> None:
    rig = Rig(0)
    port = BusyPort(rig.network, name)
    port.wake_at = wake_at
    end = rig.sender if name == SENDER else rig.receiver
    end._port = port
    end.step(0.0975)
    assert port.num_waits == num_waits


def test_memory_is_released_once_and_not_before_zmq_is_done_with_it() -> None:
    holds = Holds()
    segment = Segment(SegmentKey(1, Stream.ANCHOR, 0, 0), memoryview(b"abc"))
    first, second = Hold(), Hold()
    holds.add(segment, first)
    holds.add(segment, second)
    assert holds.release() == []
    first.done = True
    holds.retire(segment)
    assert holds.release() == []
    second.done = True
    assert holds.release() == [segment.key]
    assert holds.release() == []
    assert len(holds) == 0


def test_an_aborted_transfer_keeps_the_memory_that_is_still_being_sent() -> None:
    rig = live_rig()
    rig.step_sender()
    held = [m for m in rig.network.ports[SENDER].outbox if m.payload is not None]
    assert held
    rig.sender.abort(1, "request aborted")
    rig.step_sender()
    released = [e for e in rig.sent if isinstance(e, SegmentReleased)]
    assert len(released) < 24
    assert ended(rig) == {}
    rig.network.carry()
    rig.step_sender()
    assert len([e for e in rig.sent if isinstance(e, SegmentReleased)]) == 24
    assert ended(rig) == {1: "request aborted"}


def test_a_cancelled_transfer_ends_at_the_sender_at_once() -> None:
    rig = Rig(0)
    rig.expect(1)
    ticks(rig, 5)
    rig.receiver.cancel(1, "request aborted")
    ticks(rig, 2)
    assert ended(rig) == {1: "request aborted"}


def test_a_lost_cancellation_is_repeated_when_data_comes() -> None:
    rig = live_rig()
    rig.network.faults = Faults(lose=1.0)
    rig.receiver.cancel(1, "request aborted")
    rig.network.carry()
    rig.network.faults = Faults()
    ticks(rig, 3)
    assert ended(rig) == {1: "request aborted"}
    assert rig.receiver.counters.dropped[Drop.UNKNOWN]


def test_an_abort_reaches_the_receiver_at_once() -> None:
    rig = live_rig()
    rig.sender.abort(1, "request aborted")
    ticks(rig, 1)
    assert rig.failures() == {1: "the sender ended the transfer: request aborted"}


def test_a_lost_abort_is_repeated_when_the_receiver_asks() -> None:
    rig = live_rig()
    rig.network.faults = Faults(lose=1.0)
    rig.sender.abort(1, "request aborted")
    rig.network.carry()
    rig.network.faults = Faults()
    rig.run(10)
    assert rig.failures() == {1: "the sender ended the transfer: request aborted"}


def test_a_new_session_opens_its_transfers_at_once_and_loses_nothing() -> None:
    rig = live_rig()
    rig.step_sender()
    rig.network.cut()
    rig.receiver._lose_session()
    before_s = rig.clock()
    rig.run(10)
    assert rig.clock() - before_s < 0.5
    rig.check_arrived(1)
    assert rig.sender.counters.sessions == 2


def test_a_sender_that_has_restarted_says_so() -> None:
    rig = live_rig()
    rig.network.unplug(SENDER)
    rig.sender = rig.make_sender()
    rig.sources.clear()
    rig.offer(1)
    before_s = rig.clock()
    rig.run(10)
    assert rig.clock() - before_s < 1.0
    rig.check_arrived(1)


def test_a_lost_session_throws_away_what_was_under_way() -> None:
    rig = live_rig()
    rig.network.unplug(SENDER)
    for _ in range(400):
        rig.receiver.step()
        rig.clock.now_s += 0.01
    assert rig.receiver.state is LinkState.GREETING
    assert rig.network.ports[b"receiver"].num_resets == 1


def test_a_transfer_that_waits_for_its_sender_is_asked_for_now_and_then() -> None:
    rig = Rig(0)
    rig.expect(1)
    ticks(rig, 50)
    before = rig.network.num_messages
    ticks(rig, 5000)
    # Pings every half second both ways for ten seconds, their answers, and a few Opens.
    assert rig.network.num_messages - before < 100
    rig.offer(1)
    rig.run(10)
    rig.check_arrived(1)


@pytest.mark.parametrize("is_live", [False, True])
def test_answers_to_another_receiver_are_dropped(is_live: bool) -> None:
    rig = live_rig() if is_live else Rig(0)
    rig.receiver.step()
    nonce = rig.receiver._nonce
    frames = [Refuse(nonce + 1, "no"), Welcome(nonce + 1, 5)]
    if is_live:
        frames += [Refuse(0, "no"), Refuse(nonce, "no"), Welcome(nonce, 5)]
    state, session = rig.receiver.state, rig.receiver._session
    for frame in frames:
        rig.network.ports[b"receiver"].inbox.append((b"", [encode(frame)]))
    rig.receiver.step()
    assert rig.receiver.counters.dropped[Drop.FOREIGN] == len(frames)
    assert (rig.receiver.state, rig.receiver._session) == (state, session)
    assert rig.receiver.refusal is None


def test_one_receiver_cannot_end_or_take_the_transfer_of_another() -> None:
    rig = live_rig()
    other = rig.make_receiver(b"other")
    memory = rig.targets[1]
    other.expect(1, memory.refs(rig.order[1]), rig.shape, memory.memory)
    failures = []
    for _ in range(4):
        failures += other.step()
        rig.network.carry()
        rig.step_sender()
        rig.network.carry()
    assert "another receiver" in failures[0].reason  # type: ignore[union-attr]
    session = other._session
    assert session is not None
    other._tell_aborted(1, "mine now")
    rig.run(10)
    rig.check_arrived(1)
    assert ended(rig) == {1: None}


def test_a_peer_that_takes_nothing_delays_no_other_peer() -> None:
    rig = live_rig()
    other = rig.make_receiver(b"other")
    rig.expect(2)
    target = rig.targets.pop(2)
    rig.receiver.cancel(2, "wrong receiver")
    other.expect(7, target.refs(rig.order[2]), rig.shape, target.memory)
    for _ in range(3):
        other.step()
        rig.network.carry()
        rig.step_sender()
        rig.network.carry()
    rig.receiver.step()
    rig.network.carry()
    # The first receiver has just granted credit. Now its connection is cut, which the sender has
    # not noticed.
    rig.network.unplug(b"receiver")
    rig.offer(7, (Stream.RESIDUAL,))
    rig.step_sender()
    kinds = [decode_head(m.head, m.payload) for m in rig.network.ports[SENDER].outbox]
    assert any(isinstance(frame, Data) and frame.transfer == 7 for frame in kinds)


def decode_head(head: bytes, payload: memoryview | None) -> object:
    return decode([head, *([payload] if payload is not None else [])])[0]


def test_counters_tell_what_happened() -> None:
    rig = Rig(0, shape=TransferShape(2, 1, 100, 300), link=10_000.0)
    rig.expect(1)
    rig.offer(1)
    rig.run(10)
    sent, got = rig.sender.counters, rig.receiver.counters
    assert [sent.streams[s].payload_bytes for s in Stream] == [200, 600]
    assert [got.streams[s].payload_bytes for s in Stream] == [200, 600]
    assert [sent.streams[s].frames for s in Stream] == [2, 6]
    assert (got.to_anchors.count, got.to_residuals.count) == (1, 1)
    assert 0 < got.to_anchors.total_s < got.to_residuals.longest_s < 0.1
    assert 0 < sent.link_busy_s <= sum(sent.streams[s].busy_s for s in Stream)
    assert (sent.completed, got.completed, sent.failed, got.failed) == (1, 1, 0, 0)


def test_a_snapshot_of_counters_stays_as_it_is() -> None:
    counters = LinkCounters()
    copy = counters.snapshot()
    counters.dropped[Drop.CHECKSUM] += 1
    counters.to_anchors.observe(1.0)
    assert copy == LinkCounters() != counters
