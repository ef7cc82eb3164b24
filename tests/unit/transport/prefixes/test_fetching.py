"""A client asks a store for the right pages, and accepts only answers that fit."""

from __future__ import annotations

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from kvspec_testkit.transport.prefix_rig import LAYOUT
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.prefixes import AnchorFetched, LookupEnded, PageFetched
from sglang_kvspec.transport.prefixes.fetching import Fetching
from sglang_kvspec.transport.prefixes.frames import Fetch, Found, Gone, Piece
from sglang_kvspec.transport.wire import Drop, FrameError

SMALL = msgspec.structs.replace(LAYOUT, anchor_page_bytes=4, residual_page_bytes=6)
ANCHOR, RESIDUAL = b"anch", b"residu"
STAMP = xxh3_64_intdigest(ANCHOR)
SESSION = 5


def asked(num_pages: int, window_pages: int = 1000, *, anchors_first: bool = False) -> Fetching:
    fetching = Fetching(SMALL, window_bytes=10 * window_pages)
    keys = [bytes([i % 256]) * 32 for i in range(num_pages)]
    fetching.seek(1, keys, anchors_first=anchors_first)
    return fetching


def send(fetching: Fetching, page: int, anchor: bytes = ANCHOR) -> list[object]:
    """Send the pieces of a page: two of the anchor, one of the residual."""
    events: list[object] = []
    for stream, offset, payload in (
        (Stream.ANCHOR, 0, anchor[:1]),
        (Stream.RESIDUAL, 0, RESIDUAL),
        (Stream.ANCHOR, 1, anchor[1:]),
    ):
        events += fetching.piece(Piece(SESSION, 1, stream, page, offset, len(payload)), payload)
    return events


def test_only_complete_pages_are_asked_for() -> None:
    fetching = asked(4)
    assert not fetching.next_fetches(SESSION)
    assert not fetching.found(Found(SESSION, 1, (STAMP,) * 3, 2))
    frames = fetching.next_fetches(SESSION)
    keys = ((bytes([0]) * 32, STAMP), (bytes([1]) * 32, STAMP))
    assert frames == [Fetch(SESSION, 1, stream, 0, keys) for stream in Stream]
    assert not fetching.next_fetches(SESSION)
    page = PageFetched(1, 0, bytearray(ANCHOR), bytearray(RESIDUAL))
    assert send(fetching, 0) == [page]
    assert send(fetching, 1)[1:] == [LookupEnded(1, 2, None)]
    assert len(fetching) == 0


def test_no_more_is_asked_for_than_the_window_and_a_frame_take() -> None:
    fetching = asked(1000, window_pages=300)
    fetching.found(Found(SESSION, 1, (STAMP,) * 1000, 1000))
    sizes = []
    while frames := fetching.next_fetches(SESSION):
        sizes.append(len(frames[0].pages))
    assert sizes == [256, 44]
    send(fetching, 7)
    (anchors, residuals) = fetching.next_fetches(SESSION)
    assert (anchors.first, len(anchors.pages), residuals.first) == (300, 1, 300)


def test_a_page_larger_than_the_window_goes_alone() -> None:
    fetching = asked(3, window_pages=0)
    fetching.found(Found(SESSION, 1, (STAMP,) * 3, 3))
    assert [len(frame.pages) for frame in fetching.next_fetches(SESSION)] == [1, 1]
    assert not fetching.next_fetches(SESSION)


def test_another_anchor_than_the_one_that_was_found_ends_the_prefix() -> None:
    fetching = asked(3)
    fetching.found(Found(SESSION, 1, (STAMP,) * 3, 3))
    fetching.next_fetches(SESSION)
    assert send(fetching, 2)
    assert send(fetching, 1, anchor=b"anchor"[2:]) == []
    (page, ended) = send(fetching, 0)
    assert isinstance(page, PageFetched)
    assert isinstance(ended, LookupEnded)
    assert "not the one" in str(ended.reason)


def test_what_is_behind_a_page_that_is_gone_is_not_waited_for() -> None:
    fetching = asked(3)
    fetching.found(Found(SESSION, 1, (STAMP,) * 3, 3))
    fetching.next_fetches(SESSION)
    assert not fetching.gone(Gone(SESSION, 1, 1))
    with pytest.raises(FrameError):
        send(fetching, 2)
    assert len(send(fetching, 0)) == 2


@pytest.mark.parametrize(
    ("stamps", "num_complete"), [((STAMP,) * 4, 3), ((STAMP,), 2), ((STAMP,) * 4, 4)]
)
def test_an_answer_of_another_question_is_dropped(
    stamps: tuple[int, ...], num_complete: int
) -> None:
    fetching = asked(3)
    with pytest.raises(FrameError) as caught:
        fetching.found(Found(SESSION, 1, stamps, num_complete))
    assert caught.value.drop is Drop.MISPLACED
    assert not fetching.next_fetches(SESSION)


def test_a_second_answer_is_dropped() -> None:
    fetching = asked(3)
    fetching.found(Found(SESSION, 1, (STAMP,), 1))
    with pytest.raises(FrameError):
        fetching.found(Found(SESSION, 1, (STAMP,) * 3, 3))


def test_a_record_grows_from_its_start_to_its_end() -> None:
    fetching = asked(1)
    fetching.found(Found(SESSION, 1, (STAMP,), 1))
    fetching.next_fetches(SESSION)
    for offset, payload in ((1, b"nch"), (0, b"anchor")):
        frame = Piece(SESSION, 1, Stream.ANCHOR, 0, offset, len(payload))
        with pytest.raises(FrameError) as caught:
            fetching.piece(frame, payload)
        assert caught.value.drop is Drop.MISPLACED
    assert len(send(fetching, 0)) == 2


# Anchors first


def send_part(fetching: Fetching, stream: Stream, page: int, payload: bytes) -> list[object]:
    return list(fetching.piece(Piece(SESSION, 1, stream, page, 0, len(payload)), payload))


def spans(frames: list[Fetch]) -> list[tuple[Stream, int, int]]:
    return [(Stream(frame.stream), frame.first, len(frame.pages)) for frame in frames]


def test_all_anchors_are_asked_for_before_residuals() -> None:
    fetching = asked(5, window_pages=3, anchors_first=True)
    fetching.found(Found(SESSION, 1, (STAMP,) * 5, 5))
    assert spans(fetching.next_fetches(SESSION)) == [(Stream.ANCHOR, 0, 3)]
    for page in range(2):
        anchored = AnchorFetched(1, page, bytearray(ANCHOR))
        assert send_part(fetching, Stream.ANCHOR, page, ANCHOR) == [anchored]
    assert spans(fetching.next_fetches(SESSION)) == [(Stream.ANCHOR, 3, 2)]
    assert not fetching.next_fetches(SESSION)
    for page in (2, 4, 3):
        send_part(fetching, Stream.ANCHOR, page, ANCHOR)
    assert spans(fetching.next_fetches(SESSION)) == [(Stream.RESIDUAL, 0, 3)]
    whole = PageFetched(1, 0, bytearray(ANCHOR), bytearray(RESIDUAL))
    assert send_part(fetching, Stream.RESIDUAL, 0, RESIDUAL) == [whole]
    assert spans(fetching.next_fetches(SESSION)) == [(Stream.RESIDUAL, 3, 1)]
    for page in (1, 2, 3):
        assert len(send_part(fetching, Stream.RESIDUAL, page, RESIDUAL)) == 1
        fetching.next_fetches(SESSION)
    (_, ended) = send_part(fetching, Stream.RESIDUAL, 4, RESIDUAL)
    assert ended == LookupEnded(1, 5, None)
    assert len(fetching) == 0


def test_a_prefix_that_is_not_all_there_comes_page_by_page() -> None:
    fetching = asked(3, anchors_first=True)
    fetching.found(Found(SESSION, 1, (STAMP,) * 3, 2))
    assert [frame.stream for frame in fetching.next_fetches(SESSION)] == list(Stream)
    assert send(fetching, 0) == [PageFetched(1, 0, bytearray(ANCHOR), bytearray(RESIDUAL))]


def test_anchors_of_one_lookup_go_before_residuals_of_another() -> None:
    fetching = asked(2, window_pages=3)
    fetching.found(Found(SESSION, 1, (STAMP,) * 2, 2))
    fetching.seek(2, [b"k" * 32] * 2, anchors_first=True)
    fetching.found(Found(SESSION, 2, (STAMP,) * 2, 2))
    frames = fetching.next_fetches(SESSION)
    assert [(frame.lookup, len(frame.pages)) for frame in frames] == [(2, 2), (1, 1), (1, 1)]


@pytest.mark.parametrize("num_anchored", [0, 1])
def test_a_part_that_was_not_asked_for_yet_or_again_is_dropped(num_anchored: int) -> None:
    fetching = asked(2, anchors_first=True)
    fetching.found(Found(SESSION, 1, (STAMP,) * 2, 2))
    fetching.next_fetches(SESSION)
    if num_anchored:
        for page in range(2):
            send_part(fetching, Stream.ANCHOR, page, ANCHOR)
        fetching.next_fetches(SESSION)
    stream, payload = ((Stream.RESIDUAL, RESIDUAL), (Stream.ANCHOR, ANCHOR))[num_anchored]
    for wrong in (payload, b""):
        with pytest.raises(FrameError):
            send_part(fetching, stream, 0, wrong)


def test_residuals_that_are_gone_end_a_prefix_whose_anchors_are_here() -> None:
    fetching = asked(4, window_pages=2, anchors_first=True)
    fetching.found(Found(SESSION, 1, (STAMP,) * 4, 4))
    for first in (0, 2):
        fetching.next_fetches(SESSION)
        for page in (first, first + 1):
            send_part(fetching, Stream.ANCHOR, page, ANCHOR)
    fetching.next_fetches(SESSION)
    assert not fetching.gone(Gone(SESSION, 1, 1))
    assert not fetching.next_fetches(SESSION)
    (page, ended) = send_part(fetching, Stream.RESIDUAL, 0, RESIDUAL)
    assert isinstance(page, PageFetched)
    assert isinstance(ended, LookupEnded)
    assert "evicted or damaged" in str(ended.reason)


def test_an_anchor_that_is_another_ends_the_prefix_before_its_residual_is_asked_for() -> None:
    fetching = asked(2, anchors_first=True)
    fetching.found(Found(SESSION, 1, (STAMP,) * 2, 2))
    fetching.next_fetches(SESSION)
    assert len(send_part(fetching, Stream.ANCHOR, 0, ANCHOR)) == 1
    assert not send_part(fetching, Stream.ANCHOR, 1, b"chor")
    assert spans(fetching.next_fetches(SESSION)) == [(Stream.RESIDUAL, 0, 1)]
    assert len(send_part(fetching, Stream.RESIDUAL, 0, RESIDUAL)) == 2
