"""Records that one server has asked for. Each is read at its turn and sent piece by piece."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from sglang_kvspec.kv.prefix_store import PrefixReader, StoredPage
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.port import Hold
from sglang_kvspec.transport.prefixes.frames import (
    STORE_PIECE_BYTES,
    Fetch,
    Gone,
    Piece,
    StoreLayout,
)
from sglang_kvspec.transport.wire import Drop, FrameError

# Bytes for one server that were handed to ZMQ and are not on the network yet.
MAX_UNSENT_BYTES = 4 << 20
# Pages asked for and not sent yet, in both streams. Honest servers ask for a window at a time.
MAX_WAITING_PAGES = 4096


class _Job(NamedTuple):
    lookup: int
    number: int
    page: StoredPage


class _Sending:
    """Record that is being sent, or the news that there is none."""

    def __init__(self, job: _Job, stream: Stream, record: memoryview | None) -> None:
        self._job, self._stream, self._record = job, stream, record
        self._offset = 0

    def next(self, session: int) -> tuple[Piece | Gone, memoryview | None]:
        if self._record is None:
            return Gone(session, self._job.lookup, self._job.number), None
        piece = self._record[self._offset : self._offset + STORE_PIECE_BYTES]
        lookup, number = self._job.lookup, self._job.number
        return Piece(session, lookup, self._stream, number, self._offset, len(piece)), piece

    def sent(self, num_bytes: int) -> bool:
        """Record that num_bytes were sent. Return True if the record is complete."""
        self._offset += num_bytes
        return self._record is None or self._offset == len(self._record)


class Outbox:
    def __init__(self, store: PrefixReader, layout: StoreLayout, session: int) -> None:
        self._store, self._session = store, session
        self._sizes = (layout.anchor_page_bytes, layout.residual_page_bytes)
        self._jobs: dict[Stream, deque[_Job]] = {stream: deque() for stream in Stream}
        self._current: dict[Stream, _Sending] = {}
        self._unsent: deque[tuple[Hold, int]] = deque()

    def ask(self, frame: Fetch) -> None:
        """Queue the pages of a Fetch. Raises FrameError if too many pages would wait."""
        num_waiting = sum(len(jobs) for jobs in self._jobs.values())
        if num_waiting + len(frame.pages) > MAX_WAITING_PAGES:
            detail = f"{num_waiting} pages wait, {len(frame.pages)} more exceed {MAX_WAITING_PAGES}"
            raise FrameError(Drop.NO_ROOM, detail)
        self._jobs[frame.stream].extend(
            _Job(frame.lookup, frame.first + i, StoredPage(*page))
            for i, page in enumerate(frame.pages)
        )

    def has(self, stream: Stream) -> bool:
        return bool(self._current.get(stream) or self._jobs[stream])

    @property
    def is_full(self) -> bool:
        """Return True if too many bytes for this server wait for the network."""
        while self._unsent and self._unsent[0][0].done:
            self._unsent.popleft()
        return sum(num_bytes for _, num_bytes in self._unsent) >= MAX_UNSENT_BYTES

    def next(self, stream: Stream) -> tuple[Piece | Gone, memoryview | None]:
        """Return the frame and payload to send next, to be confirmed by sent()."""
        if stream not in self._current:
            job = self._jobs[stream].popleft()
            self._current[stream] = _Sending(job, stream, self._read(stream, job.page))
        return self._current[stream].next(self._session)

    def sent(self, stream: Stream, hold: Hold, num_bytes: int) -> None:
        if num_bytes:
            self._unsent.append((hold, num_bytes))
        if self._current[stream].sent(num_bytes):
            del self._current[stream]

    def _read(self, stream: Stream, page: StoredPage) -> memoryview | None:
        record = memoryview(bytearray(self._sizes[stream]))
        read = self._store.read_anchors if stream is Stream.ANCHOR else self._store.read_residuals
        (is_whole,) = read([page], [record])
        return record if is_whole else None
