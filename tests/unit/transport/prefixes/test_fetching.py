"""What is asked of a store, and what is believed of its answers."""

from __future__ import annotations

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.prefix_server.testing import LAYOUT
from sglang_kvspec.transport.prefixes import LookupEnded, PageFetched
from sglang_kvspec.transport.prefixes.fetching import Fetching
from sglang_kvspec.transport.prefixes.frames import Fetch, Found, Gone, Piece
from sglang_kvspec.transport.wire import Drop, FrameError

SMALL = msgspec.structs.replace(LAYOUT, anchor_page_bytes=4, residual_page_bytes=6)
ANCHOR, RESIDUAL = b"anch", b"residu"
STAMP = xxh3_64_intdigest(ANCHOR)
SESSION = 5


def asked(num_pages: int, window_pages: int = 1000) -> Fetching:
    fetching = Fetching(SMALL, window_bytes=10 * window_pages)
    fetching.seek(1, [bytes([i % 256]) * 32 for i in range(num_pages)])
    return fetching


def send(fetching: Fetching, page: int, anchor: bytes = ANCHOR) -> list[object]:
    """A page's pieces; the anchor in two."""
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
