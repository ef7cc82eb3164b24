"""Copies of residual pages between the cache on a GPU and the pinned store on its host.

All layers of a page lie in one run of memory. The copy engines move pages at the speed of the link,
and take no multiprocessors from kernels. The CPU makes one call for all pages. A forward that need
not wait for whole pages fetches pages layer by layer. For each layer a small kernel then reads all
pages from the pinned memory, in one launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from sglang_kvspec.kv.copy_streams import CopyStream, CopyStreams, Event
from sglang_kvspec.kv.host_store import HostStore

# (page, slot): the row of the store, and the cache slot.
Pair = tuple[int, int]

# Most fetch times that are kept; the oldest are dropped.
MOST_TIMED = 256


class HostCopies:
    """Copies in both directions, ordered by fences.

    A slot may get another page, and a page another generation, while former copies are under way.
    So a stream that will write waits on the device for pending reads and writes of that memory. A
    stream that will read waits for pending writes. Only await_rows() and settle() block the CPU.
    """

    def __init__(self, store: HostStore, copy_streams: CopyStreams) -> None:
        self._store, self._copy_streams = store, copy_streams
        # By cache slot: the copies that may still use it.
        self._slot_uses: dict[int, list[Event]] = {}
        # By page: the last copy into its row of the store.
        self._row_written: dict[int, Event] = {}
        # Fetches whose time was not taken yet: (bytes, begun, done).
        self._timed: deque[tuple[int, Event, Event]] = deque(maxlen=MOST_TIMED)

    def copy_out(self, pairs: Sequence[Pair]) -> None:
        """Write slots through to the store, after the work that the main stream has so far."""
        if not pairs:
            return
        # A fetch may still read one of these rows, but only for a page that was freed meanwhile.
        stream = self._copy_streams.to_host
        stream.wait(self._copy_streams.main.mark())
        pages, slots = [page for page, _ in pairs], [slot for _, slot in pairs]
        self._store.put(stream, pages, slots)
        done = stream.mark()
        for page, slot in pairs:
            self._row_written[page] = done
            self._slot_uses.setdefault(slot, []).append(done)

    def fetch(self, pairs: Sequence[Pair]) -> Event:
        """Copy pages into slots, whose former content the main stream may still use. Return the
        event of the copy: give it to main_waits() before the main stream reads the pages."""
        stream = self._fetching_stream(pairs)
        # Mark the start after the fences, so that waiting for them does not count as link time.
        begun = stream.mark(timed=True)
        pages, slots = [page for page, _ in pairs], [slot for _, slot in pairs]
        if pairs:
            self._store.get(stream, slots, pages)
        done = stream.mark(timed=True)
        self._timed.append((self._store.link_bytes(pages), begun, done))
        self._slot_uses |= {slot: [done] for _, slot in pairs}
        return done

    def await_rows(self, pages: Iterable[int]) -> None:
        """Block the CPU until copies into these rows of the store are done, so that it may read or
        write them itself. A fetch may still read such a row, but only for a freed page."""
        for event in _distinct(self._row_written.get(page) for page in pages):
            event.synchronize()

    def settle(self, pages: Iterable[int], slot_of: Callable[[int], int]) -> None:
        """Let the store take what it needs of pages before they lose their slots or are read. Block
        the CPU until copies of pages that are still doubtful are done. slot_of: of a doubtful
        page."""
        doubtful = self._store.doubtful(pages)
        self.await_rows(doubtful)
        self._store.settle(self._copy_streams.to_host, doubtful, list(map(slot_of, doubtful)))

    def take_fetch_times(self) -> list[tuple[int, float]]:
        """Return and forget (bytes, seconds) of finished fetches of whole pages. Do not wait."""
        times = []
        while self._timed and self._timed[0][2].query():
            num_bytes, begun, done = self._timed.popleft()
            times.append((num_bytes, self._copy_streams.to_device.seconds(begun, done)))
        return times

    def fetch_by_layer(self, pairs: Sequence[Pair]) -> list[Event]:
        """Copy pages into slots layer by layer. Return the event of each layer's copy."""
        stream = self._fetching_stream(pairs)
        pages, slots = [page for page, _ in pairs], [slot for _, slot in pairs]
        events = [stream.mark() for _ in self._store.get_by_layer(stream, slots, pages)]
        self._slot_uses |= {slot: [events[-1]] for _, slot in pairs}
        return events

    def _fetching_stream(self, pairs: Sequence[Pair]) -> CopyStream:
        """Return the stream of fetches, made to wait for all uses of these pages and slots."""
        stream = self._copy_streams.to_device
        stream.wait(self._copy_streams.main.mark())
        written = [self._row_written.get(page) for page, _ in pairs]
        _wait(stream, [*written, *self._pop_uses(slot for _, slot in pairs)])
        return stream

    def main_waits(self, events: Iterable[Event]) -> None:
        """Make the main stream wait for these events."""
        _wait(self._copy_streams.main, events)

    def main_writes(self, slots: Iterable[int]) -> None:
        """Make the main stream wait for all copies of these slots, before it writes them."""
        _wait(self._copy_streams.main, self._pop_uses(slots))

    def _pop_uses(self, slots: Iterable[int]) -> list[Event]:
        return [event for slot in slots for event in self._slot_uses.pop(slot, ())]


def _distinct(events: Iterable[Event | None]) -> Collection[Event]:
    """Return each event once: copies given together share an event."""
    return {id(event): event for event in events if event is not None}.values()


def _wait(stream: CopyStream, events: Iterable[Event | None]) -> None:
    """Make the stream wait once for each event that is not over."""
    for event in _distinct(events):
        if not event.query():
            stream.wait(event)
