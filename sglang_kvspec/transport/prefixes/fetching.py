"""Lookups that are under way at a store, and what has come of them. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.prefixes.events import LookupEnded, PageFetched
from sglang_kvspec.transport.prefixes.frames import (
    MAX_FETCH_PAGES,
    Fetch,
    Found,
    Gone,
    Piece,
    StoreLayout,
)
from sglang_kvspec.transport.wire import Buffer, Drop, FrameError

# Asked for and not here yet, over all lookups; a page goes out in any case. A few pages of a large
# model, so that the store reads one while another is on its way.
FETCH_WINDOW_BYTES = 32 << 20

FetchEvent = PageFetched | LookupEnded


class _Page:
    """Room for a page's two records, which arrive from their start on."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.records = tuple(bytearray(size) for size in sizes)
        self._filled = [0, 0]

    def write(self, stream: Stream, offset: int, payload: Buffer) -> None:
        record, end = self.records[stream], offset + len(payload)
        if offset != self._filled[stream] or end > len(record):
            raise FrameError(Drop.MISPLACED, f"{offset} to {end} of {len(record)} bytes")
        record[offset:end] = payload
        self._filled[stream] = end

    @property
    def is_complete(self) -> bool:
        return self._filled == [len(record) for record in self.records]


@dataclass(slots=True)
class _Lookup:
    """end: number of the first page that is not wanted; None until the store has answered."""

    keys: Sequence[bytes]
    stamps: tuple[int, ...] = ()
    num_found: int = 0
    end: int | None = None
    next_page: int = 0
    on_their_way: dict[int, _Page] = field(default_factory=dict)
    reason: str | None = None

    @property
    def is_over(self) -> bool:
        return self.end is not None and self.next_page >= self.end and not self.on_their_way


class Fetching:
    def __init__(self, layout: StoreLayout, window_bytes: int = FETCH_WINDOW_BYTES) -> None:
        self._sizes = (layout.anchor_page_bytes, layout.residual_page_bytes)
        self._window_pages = max(1, window_bytes // sum(self._sizes))
        self._lookups: dict[int, _Lookup] = {}

    def __len__(self) -> int:
        return len(self._lookups)

    def seek(self, lookup: int, keys: Sequence[bytes]) -> None:
        """The store was asked for pages of these keys."""
        assert lookup not in self._lookups, f"lookup {lookup} is under way"
        self._lookups[lookup] = _Lookup(keys)

    def cancel(self, lookup: int) -> None:
        """What still comes of it is thrown away."""
        self._lookups.pop(lookup, None)

    def found(self, frame: Found) -> list[FetchEvent]:
        """Raises FrameError for an answer that was not asked for."""
        asked = self._of(frame.lookup)
        num_stamps = len(frame.stamps)
        if asked.end is not None or not frame.num_complete <= num_stamps <= len(asked.keys):
            raise FrameError(Drop.MISPLACED, f"{num_stamps} of {len(asked.keys)} pages")
        asked.stamps, asked.num_found = frame.stamps, frame.num_complete
        asked.end = frame.num_complete
        return self._ended(frame.lookup)

    def next_fetches(self, session: int) -> list[Fetch]:
        """What to ask for now: of each page the anchor and the residual, in as few frames as may
        be, and no more than the window has room for."""
        room = self._window_pages - sum(len(each.on_their_way) for each in self._lookups.values())
        frames = []
        for number, asked in self._lookups.items():
            count = min(room, MAX_FETCH_PAGES, (asked.end or 0) - asked.next_page)
            if count < 1:
                continue
            first = asked.next_page
            ids = range(first, first + count)
            pages = tuple((asked.keys[i], asked.stamps[i]) for i in ids)
            asked.on_their_way.update((i, _Page(self._sizes)) for i in ids)
            asked.next_page += count
            room -= count
            frames += [Fetch(session, number, stream, first, pages) for stream in Stream]
        return frames

    def piece(self, frame: Piece, payload: Buffer) -> list[FetchEvent]:
        """Raises FrameError for what was not asked for, or not now."""
        asked = self._of(frame.lookup)
        page = asked.on_their_way.get(frame.page)
        if page is None:
            raise FrameError(Drop.UNKNOWN, f"page {frame.page} of lookup {frame.lookup}")
        page.write(frame.stream, frame.offset, payload)
        if not page.is_complete:
            return []
        anchor, residual = page.records
        if xxh3_64_intdigest(anchor) != asked.stamps[frame.page]:
            self._cut(asked, frame.page, "an anchor is not the one that was found")
            return self._ended(frame.lookup)
        del asked.on_their_way[frame.page]
        fetched = PageFetched(frame.lookup, frame.page, anchor, residual)
        return [fetched, *self._ended(frame.lookup)]

    def gone(self, frame: Gone) -> list[FetchEvent]:
        """Raises FrameError for a page that was not asked for."""
        asked = self._of(frame.lookup)
        if frame.page not in asked.on_their_way:
            raise FrameError(Drop.UNKNOWN, f"page {frame.page} of lookup {frame.lookup}")
        self._cut(asked, frame.page, "a page was evicted, or damaged, while it was fetched")
        return self._ended(frame.lookup)

    def end_all(self, reason: str) -> list[FetchEvent]:
        """The link is lost."""
        ended: list[FetchEvent] = [
            LookupEnded(number, asked.num_found, reason) for number, asked in self._lookups.items()
        ]
        self._lookups.clear()
        return ended

    def _of(self, lookup: int) -> _Lookup:
        asked = self._lookups.get(lookup)
        if asked is None:
            raise FrameError(Drop.UNKNOWN, f"lookup {lookup}")
        return asked

    def _cut(self, asked: _Lookup, page: int, reason: str) -> None:
        """What comes after a page that is not there is of no use."""
        asked.end, asked.reason = page, reason
        asked.on_their_way = {i: each for i, each in asked.on_their_way.items() if i < page}

    def _ended(self, lookup: int) -> list[FetchEvent]:
        asked = self._lookups[lookup]
        if not asked.is_over:
            return []
        del self._lookups[lookup]
        return [LookupEnded(lookup, asked.num_found, asked.reason)]
