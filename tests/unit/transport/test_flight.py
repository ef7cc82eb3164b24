"""When pieces count as delivered or as lost, and when more may be sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.flight import PACED, UNPACED, Flight, FlightLimits
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.segments import Piece, Segment, SegmentKey

LIMITS = FlightLimits(piece_bytes=100, residual_bytes=250, total_bytes=600, frames=5)


def piece(stream: Stream = Stream.ANCHOR, length: int = 100) -> Piece:
    return Piece(Segment(SegmentKey(1, stream, 0, 0), memoryview(bytes(length))), 0, length)


def seen(highest: int, *sequences: int) -> bytes:
    return sum(1 << highest - sequence for sequence in sequences).to_bytes(16, "little")


def test_residuals_leave_room_for_anchors() -> None:
    flight = Flight(LIMITS)
    for sequence in (1, 2):
        flight.add(sequence, piece(Stream.RESIDUAL))
    assert flight.fit(Stream.RESIDUAL, 100) == 0
    assert flight.fit(Stream.RESIDUAL, 50) == 50
    assert flight.fit(Stream.ANCHOR, 1000) == 100


@pytest.mark.parametrize("limits", [UNPACED, PACED])
def test_no_anchor_sits_behind_more_than_1_mb_and_two_pieces_may_be_on_their_way(
    limits: FlightLimits,
) -> None:
    assert limits.residual_bytes <= 1_000_000
    flight = Flight(limits)
    pieces = []
    while length := flight.fit(Stream.RESIDUAL, 10**9):
        pieces.append(length)
        flight.add(len(pieces), piece(Stream.RESIDUAL, length))
    assert len(pieces) >= 2
    assert sum(pieces) > 0.9 * limits.residual_bytes


def test_anchors_may_go_in_longer_pieces() -> None:
    flight = Flight(replace(LIMITS, anchor_piece_bytes=200))
    assert flight.fit(Stream.ANCHOR, 1000) == 200
    assert flight.fit(Stream.RESIDUAL, 1000) == 100
    with pytest.raises(TransportError, match="exclude"):
        replace(LIMITS, anchor_piece_bytes=351)


def test_the_number_of_frames_is_bounded() -> None:
    flight = Flight(LIMITS)
    for sequence in range(1, 6):
        flight.add(sequence, piece(length=1))
    assert flight.fit(Stream.ANCHOR, 1) == 0


def test_credit_stops_and_narrows() -> None:
    flight = Flight(LIMITS)
    flight.grant(0)
    assert flight.fit(Stream.ANCHOR, 100) == 0
    flight.grant(30)
    assert flight.fit(Stream.ANCHOR, 100) == 30
    flight.add(1, piece(length=20))
    assert flight.fit(Stream.ANCHOR, 100) == 0
    flight.grant(1 << 30)
    assert flight.fit(Stream.ANCHOR, 100) == 100


def test_a_gap_is_lost_once_it_cannot_be_reordering() -> None:
    flight = Flight(LIMITS)
    first, second = piece(), piece()
    flight.add(1, first)
    flight.add(2, second)
    assert flight.settle(4, seen(4, 2, 3, 4), echo=0) == ([second], [])
    assert flight.settle(5, seen(5, 2, 3, 4, 5), echo=0) == ([], [first])
    assert (len(flight), flight.total_bytes) == (0, 0)


def test_the_answer_to_a_ping_decides_on_all_before_it() -> None:
    flight = Flight(LIMITS)
    before, after = piece(), piece()
    flight.add(1, before)
    flight.add(3, after)
    assert flight.settle(2, seen(2, 2), echo=2) == ([], [before])
    assert len(flight) == 1


def test_an_acknowledgement_of_the_past_changes_nothing() -> None:
    flight = Flight(LIMITS)
    flight.add(7, piece())
    assert flight.settle(6, seen(6, 6), echo=0) == ([], [])
    assert flight.bytes_of == [100, 0]


def test_a_lost_connection_gives_everything_back_in_order() -> None:
    flight = Flight(LIMITS)
    pieces = [piece(), piece(Stream.RESIDUAL), piece()]
    for sequence, sent in enumerate(pieces, 1):
        flight.add(sequence, sent)
    assert flight.drain() == pieces
    assert (len(flight), flight.bytes_of) == (0, [0, 0])


@pytest.mark.parametrize(
    "limits",
    [
        {"piece_bytes": 0},
        {"piece_bytes": 2 << 20, "residual_bytes": 3 << 20},
        {"piece_bytes": 300, "residual_bytes": 200},
        {"residual_bytes": 4 << 20},
        {"frames": 1024},
    ],
)
def test_limits_that_exclude_one_another_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(TransportError, match="exclude"):
        FlightLimits(**limits)
