"""Opens at a sender: who may have a transfer, what fits it, how much may be open."""

from __future__ import annotations

import msgspec
import pytest

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport import FlightLimits, SegmentKey, Stream
from sglang_kvspec.transport.frames import Open
from sglang_kvspec.transport.scheduler import SendScheduler

LIMITS = FlightLimits(piece_bytes=10, residual_bytes=25, total_bytes=60, frames=8)
CREDIT = 1 << 20


def open_frame(transfer: int, num_pages: int = 2) -> Open:
    pages = tuple((40 + page, transfer) for page in range(num_pages))
    return Open(1, 1, transfer, pages, 1, 23, 57, num_pages)


def offer(scheduler: SendScheduler, transfer: int, stream: Stream, page: int, size: int) -> bool:
    return scheduler.offer(SegmentKey(transfer, stream, page, 0), memoryview(bytes(size)), 0.0)


def test_only_one_receiver_has_a_transfer() -> None:
    scheduler = SendScheduler(LIMITS)
    assert scheduler.open(b"a", open_frame(0)).refusal is None
    assert scheduler.open(b"a", open_frame(0)).refusal is None
    assert "another receiver" in str(scheduler.open(b"b", open_frame(0)).refusal)
    assert "other pages" in str(scheduler.open(b"a", open_frame(0, num_pages=3)).refusal)


def test_open_pages_are_bounded() -> None:
    scheduler = SendScheduler(LIMITS)
    refused = [scheduler.open(b"a", open_frame(t, num_pages=1 << 15)).refusal for t in range(40)]
    assert refused[:32] == [None] * 32
    assert "limit" in str(refused[32])
    assert scheduler.abort(3, "over") is not None
    assert scheduler.open(b"a", open_frame(50, num_pages=1 << 15)).refusal is None


def test_residuals_of_pages_that_have_none_are_refused() -> None:
    scheduler = SendScheduler(LIMITS)
    frame = msgspec.structs.replace(open_frame(0), num_residual_pages=1)
    assert scheduler.open(b"a", frame).refusal is None
    offer(scheduler, 0, Stream.RESIDUAL, 0, 5)
    offer(scheduler, 0, Stream.ANCHOR, 1, 5)
    with pytest.raises(TransportError, match="outside"):
        offer(scheduler, 0, Stream.RESIDUAL, 1, 5)


@pytest.mark.parametrize(
    ("stream", "page", "size"),
    [(Stream.ANCHOR, 0, 24), (Stream.ANCHOR, 2, 5), (Stream.RESIDUAL, 1, 5)],
)
def test_what_was_offered_before_and_does_not_fit_the_open_ends_the_transfer(
    stream: Stream, page: int, size: int
) -> None:
    scheduler = SendScheduler(LIMITS)
    scheduler.add_peer(b"a", CREDIT)
    offer(scheduler, 1, stream, page, size)
    frame = msgspec.structs.replace(open_frame(1), num_residual_pages=1)
    opening = scheduler.open(b"a", frame)
    assert opening.ended is not None
    assert opening.ended.reason == opening.refusal == scheduler.open(b"a", frame).refusal
    assert [segment.key for segment in opening.ended.segments] == [SegmentKey(1, stream, page, 0)]
    assert scheduler.choose() is None
    assert scheduler.is_idle


@pytest.mark.parametrize("changed", [{"num_residual_pages": 1}, {"anchor_bytes": 24}])
def test_an_open_that_is_repeated_may_not_change(changed: dict[str, int]) -> None:
    scheduler = SendScheduler(LIMITS)
    scheduler.add_peer(b"a", CREDIT)
    assert scheduler.open(b"a", open_frame(0)).refusal is None
    opening = scheduler.open(b"a", msgspec.structs.replace(open_frame(0), **changed))
    assert "other pages" in str(opening.refusal)
    assert opening.ended is None
    offer(scheduler, 0, Stream.RESIDUAL, 1, 5)
    assert scheduler.choose() is not None


def test_an_open_of_more_residual_pages_than_pages_is_refused() -> None:
    scheduler = SendScheduler(LIMITS)
    frame = msgspec.structs.replace(open_frame(0), num_residual_pages=3)
    assert "no transfer can have" in str(scheduler.open(b"a", frame).refusal)
    assert scheduler.is_idle
