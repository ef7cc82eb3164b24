"""Pages of residuals between the cache on a GPU and the pinned store on its host.

All layers of a page lie in one run of memory: the copy engines move them at the speed of the link,
beside the kernels and without taking multiprocessors from them, and the CPU makes one call for all
pages. A forward that need not wait for whole pages has them layer by layer, by a small kernel that
reads the pinned memory, all pages of a layer in one launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import torch

from sglang_kvspec.kv.copy_streams import CopyStream, CopyStreams, Event
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.transfers import sent_together

# (page, slot): the row of the store, and the cache slot.
Pair = tuple[int, int]

# Times of fetches kept for who asks for them; older ones are forgotten.
MOST_TIMED = 256


class HostCopies:
    """Copies in both directions, each behind the fences that keep it right.

    A slot may get another page, and a page another generation, while copies of the former are under
    way: a stream that is to write waits on the device for all that still reads or writes there, and
    a stream that is to read waits for what writes. The CPU waits in await_rows() alone.
    """

    def __init__(self, cache: RecordPool, store: RecordPool, copy_streams: CopyStreams) -> None:
        """Both pools by page."""
        self._cache, self._store, self._copy_streams = cache, store, copy_streams
        # What still uses a cache slot, besides the main stream.
        self._slot_uses: dict[int, list[Event]] = {}
        # Of a page's row of the store, its last copy out.
        self._row_written: dict[int, Event] = {}
        # Fetches whose time nobody has asked for: bytes, begun, done.
        self._timed: deque[tuple[int, Event, Event]] = deque(maxlen=MOST_TIMED)

    def copy_out(self, pairs: Sequence[Pair]) -> None:
        """Write slots through to the store behind the work that the main stream has by now."""
        if not pairs:
            return
        # A fetch may still read one of these rows: of a page that was freed meanwhile, for nobody.
        stream = self._copy_streams.to_host
        stream.wait(self._copy_streams.main.mark())
        pages, slots = [page for page, _ in pairs], [slot for _, slot in pairs]
        stream.copy_pages(self._store.pages, pages, self._cache.pages, slots)
        done = stream.mark()
        for page, slot in pairs:
            self._row_written[page] = done
            self._slot_uses.setdefault(slot, []).append(done)

    def fetch(self, pairs: Sequence[Pair]) -> Event:
        """Bring pages into slots, whose former content the main stream may still be using. Returns
        when they are there: `main_waits` before the main stream reads them."""
        stream = self._fetching_stream(pairs)
        # Behind the fences: waiting for them is not the link's time.
        begun = stream.mark(timed=True)
        pages, slots = [page for page, _ in pairs], [slot for _, slot in pairs]
        if pairs:
            stream.copy_pages(self._cache.pages, slots, self._store.pages, pages)
        done = stream.mark(timed=True)
        self._timed.append((len(pairs) * self._cache.page(0).nbytes, begun, done))
        self._slot_uses |= {slot: [done] for _, slot in pairs}
        return done

    def await_rows(self, pages: Iterable[int]) -> None:
        """The CPU waits for what is being written to these rows of the store, so that it may read
        or write them itself. A fetch may read one of them still, for nobody."""
        for event in _distinct(self._row_written.get(page) for page in pages):
            event.synchronize()

    def take_fetch_times(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of whole fetches that are over and were not told yet. Waits for none."""
        times = []
        while self._timed and self._timed[0][2].query():
            num_bytes, begun, done = self._timed.popleft()
            times.append((num_bytes, self._copy_streams.to_device.seconds(begun, done)))
        return times

    def fetch_by_layer(self, pairs: Sequence[Pair]) -> list[Event]:
        """As fetch(); returns when the pages of layer 0, 1 and so on are there."""
        device = self._cache.layer(0).device
        pages, slots = sent_together(
            device, [torch.tensor(ids, dtype=torch.int32) for ids in zip(*pairs, strict=True)]
        )
        # Also behind the indices, which the main stream sends.
        stream = self._fetching_stream(pairs)
        events = []
        for layer in range(self._cache.num_layers):
            stream.copy_rows(self._cache.layer(layer), slots, self._store.layer(layer), pages)
            events.append(stream.mark())
        self._slot_uses |= {slot: [events[-1]] for _, slot in pairs}
        return events

    def _fetching_stream(self, pairs: Sequence[Pair]) -> CopyStream:
        """The stream of fetches, behind all that these pages and slots are still needed for."""
        stream = self._copy_streams.to_device
        stream.wait(self._copy_streams.main.mark())
        written = [self._row_written.get(page) for page, _ in pairs]
        _wait(stream, [*written, *self._pop_uses(slot for _, slot in pairs)])
        return stream

    def main_waits(self, events: Iterable[Event]) -> None:
        """The main stream goes on after these."""
        _wait(self._copy_streams.main, events)

    def main_writes(self, slots: Iterable[int]) -> None:
        """The main stream is about to write these slots, whatever they held."""
        _wait(self._copy_streams.main, self._pop_uses(slots))

    def _pop_uses(self, slots: Iterable[int]) -> list[Event]:
        return [event for slot in slots for event in self._slot_uses.pop(slot, ())]


def _distinct(events: Iterable[Event | None]) -> Collection[Event]:
    """Copies given together share an event: each once."""
    return {id(event): event for event in events if event is not None}.values()


def _wait(stream: CopyStream, events: Iterable[Event | None]) -> None:
    """Wait for each once, and for none that is over."""
    for event in _distinct(events):
        if not event.query():
            stream.wait(event)
