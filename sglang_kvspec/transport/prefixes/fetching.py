"""Lookups at a prefix server, and the pages that have arrived. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.prefixes.events import AnchorFetched, LookupEnded, PageFetched
from sglang_kvspec.transport.prefixes.frames import (
    MAX_FETCH_PAGES,
    Fetch,
    Found,
    Gone,
    Piece,
    StoreLayout,
)
from sglang_kvspec.transport.wire import Buffer, Drop, FrameError

# Bytes asked for and not arrived, over all lookups; one page is always allowed. A few pages of a
# large model, so that the prefix server reads one page while another is on the link.
FETCH_WINDOW_BYTES = 32 << 20

FetchEvent = AnchorFetched | PageFetched | LookupEnded


class _Page:
    """Memory for a page's two records, whose bytes arrive in order."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.records = tuple(bytearray(size) for size in sizes)
        self._filled = [0, 0]

    def write(self, stream: Stream, offset: int, payload: Buffer) -> None:
        record, end = self.records[stream], offset + len(payload)
        if offset != self._filled[stream] or end > len(record):
            detail = f"piece from byte {offset} to {end} of {len(record)} is out of place"
            raise FrameError(Drop.MISPLACED, detail)
        record[offset:end] = payload
        self._filled[stream] = end

    def has(self, stream: Stream) -> bool:
        return self._filled[stream] == len(self.records[stream])

    @property
    def is_complete(self) -> bool:
        return all(map(self.has, Stream))


@dataclass(slots=True)
class _Lookup:
    """One lookup. end: number of the first page that is not wanted; None until the prefix server
    has answered. next_page: the first page of which nothing was asked for. anchored: pages whose
    anchors have arrived, and whose residuals were not asked for."""

    keys: Sequence[bytes]
    anchors_first: bool
    stamps: tuple[int, ...] = ()
    num_found: int = 0
    end: int | None = None
    next_page: int = 0
    on_their_way: dict[int, _Page] = field(default_factory=dict)
    anchored: dict[int, _Page] = field(default_factory=dict)
    reason: str | None = None

    @property
    def num_unasked(self) -> int:
        """Return the number of pages of which nothing was asked for."""
        return max(0, (self.end or 0) - self.next_page)

    @property
    def is_over(self) -> bool:
        is_asked = self.end is not None and self.next_page >= self.end
        return is_asked and not self.on_their_way and not self.anchored


class Fetching:
    def __init__(self, layout: StoreLayout, window_bytes: int = FETCH_WINDOW_BYTES) -> None:
        self._sizes = (layout.anchor_page_bytes, layout.residual_page_bytes)
        self._window_pages = max(1, window_bytes // sum(self._sizes))
        self._lookups: dict[int, _Lookup] = {}

    def __len__(self) -> int:
        return len(self._lookups)

    def seek(self, lookup: int, keys: Sequence[bytes], *, anchors_first: bool = False) -> None:
        """Add a lookup of pages with these keys. anchors_first: if the prefix server has all pages,
        fetch all anchors before any residual."""
        assert lookup not in self._lookups, f"lookup {lookup} is already under way"
        self._lookups[lookup] = _Lookup(keys, anchors_first)

    def cancel(self, lookup: int) -> None:
        """Drop a lookup, and all that still arrives for it."""
        self._lookups.pop(lookup, None)

    def found(self, frame: Found) -> list[FetchEvent]:
        """Apply the answer to a lookup. Raises FrameError for an answer that was not asked for."""
        asked = self._of(frame.lookup)
        num_stamps = len(frame.stamps)
        if asked.end is not None or not frame.num_complete <= num_stamps <= len(asked.keys):
            detail = f"unexpected answer with {num_stamps} of {len(asked.keys)} pages"
            raise FrameError(Drop.MISPLACED, detail)
        asked.stamps, asked.num_found = frame.stamps, frame.num_complete
        asked.end = frame.num_complete
        asked.anchors_first &= frame.num_complete == len(asked.keys)
        return self._ended(frame.lookup)

    def next_fetches(self, session: int) -> list[Fetch]:
        """Return the Fetch frames that are due, few and within the window. First come anchors of
        lookups with anchors first, then the missing records of each page."""
        room = self._window_pages - sum(len(each.on_their_way) for each in self._lookups.values())
        frames = []
        for number, asked in self._lookups.items():
            if asked.anchors_first and room > 0:
                ids = self._next_pages(asked, room)
                room -= len(ids)
                frames += self._fetches(session, number, ids, (Stream.ANCHOR,))
        for number, asked in self._lookups.items():
            if room < 1:
                break
            if not asked.anchors_first:
                ids = self._next_pages(asked, room)
                room -= len(ids)
                frames += self._fetches(session, number, ids, tuple(Stream))
            elif not asked.num_unasked:
                ids = self._next_anchored(asked, room)
                room -= len(ids)
                frames += self._fetches(session, number, ids, (Stream.RESIDUAL,))
        return frames

    def _next_pages(self, asked: _Lookup, room: int) -> range:
        """Take the next pages of which nothing was asked for, to ask for them now."""
        first = asked.next_page
        ids = range(first, first + min(room, MAX_FETCH_PAGES, asked.num_unasked))
        asked.on_their_way.update((i, _Page(self._sizes)) for i in ids)
        asked.next_page = ids.stop
        return ids

    @staticmethod
    def _next_anchored(asked: _Lookup, room: int) -> range:
        """Take consecutive pages that lack only their residuals, from the first such page on."""
        first = min(asked.anchored, default=0)
        end = first
        while end in asked.anchored and end - first < min(room, MAX_FETCH_PAGES):
            end += 1
        ids = range(first, end)
        asked.on_their_way.update((i, asked.anchored.pop(i)) for i in ids)
        return ids

    def _fetches(
        self, session: int, number: int, ids: range, streams: Sequence[Stream]
    ) -> list[Fetch]:
        if not ids:
            return []
        asked = self._lookups[number]
        pages = tuple((asked.keys[i], asked.stamps[i]) for i in ids)
        return [Fetch(session, number, stream, ids.start, pages) for stream in streams]

    def piece(self, frame: Piece, payload: Buffer) -> list[FetchEvent]:
        """Write part of a record. Raises FrameError if it was not asked for, or not now."""
        asked = self._of(frame.lookup)
        page = asked.on_their_way.get(frame.page)
        if page is None:
            detail = f"page {frame.page} of lookup {frame.lookup} is not being fetched"
            raise FrameError(Drop.UNKNOWN, detail)
        comes_first = asked.anchors_first and frame.stream == Stream.ANCHOR
        if asked.anchors_first and comes_first == page.has(Stream.ANCHOR):
            detail = f"this stream of page {frame.page} is not being fetched now"
            raise FrameError(Drop.UNKNOWN, detail)
        page.write(frame.stream, frame.offset, payload)
        if not (page.has(Stream.ANCHOR) if comes_first else page.is_complete):
            return []
        anchor, residual = page.records
        if xxh3_64_intdigest(anchor) != asked.stamps[frame.page]:
            self._cut(asked, frame.page, "an anchor is not the one that the lookup found")
            return self._ended(frame.lookup)
        del asked.on_their_way[frame.page]
        if comes_first:
            asked.anchored[frame.page] = page
            return [AnchorFetched(frame.lookup, frame.page, anchor)]
        fetched = PageFetched(frame.lookup, frame.page, anchor, residual)
        return [fetched, *self._ended(frame.lookup)]

    def gone(self, frame: Gone) -> list[FetchEvent]:
        """Cut a lookup at a missing page. Raises FrameError if the page was not asked for."""
        asked = self._of(frame.lookup)
        if frame.page not in asked.on_their_way:
            detail = f"page {frame.page} of lookup {frame.lookup} is not being fetched"
            raise FrameError(Drop.UNKNOWN, detail)
        self._cut(asked, frame.page, "a page was evicted or damaged during the fetch")
        return self._ended(frame.lookup)

    def end_all(self, reason: str) -> list[FetchEvent]:
        """End all lookups, because the link is lost."""
        ended: list[FetchEvent] = [
            LookupEnded(number, asked.num_found, reason) for number, asked in self._lookups.items()
        ]
        self._lookups.clear()
        return ended

    def _of(self, lookup: int) -> _Lookup:
        asked = self._lookups.get(lookup)
        if asked is None:
            raise FrameError(Drop.UNKNOWN, f"lookup {lookup} is unknown")
        return asked

    def _cut(self, asked: _Lookup, page: int, reason: str) -> None:
        """End a lookup before `page`: pages behind a missing page are of no use."""
        asked.end, asked.reason = page, reason
        for pages in (asked.on_their_way, asked.anchored):
            for i in [i for i in pages if i >= page]:
                del pages[i]

    def _ended(self, lookup: int) -> list[FetchEvent]:
        asked = self._lookups[lookup]
        if not asked.is_over:
            return []
        del self._lookups[lookup]
        return [LookupEnded(lookup, asked.num_found, asked.reason)]
