"""Links to several senders as one link. Each sender has a part of every page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport.arrivals import (
    Arrival,
    Destination,
    PageArrived,
    TransferFailed,
)
from sglang_kvspec.transport.counters import LinkCounters, sum_of
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.segments import TransferShape
from sglang_kvspec.transport.session import LinkState


class PartLink(Protocol):
    """Link to one sender: a ReceiverLoop."""

    @property
    def refusal(self) -> str | None: ...

    @property
    def state(self) -> LinkState: ...

    def expect(
        self,
        transfer: int,
        pages: Sequence[tuple[int, int]],
        shape: TransferShape,
        destination: Destination,
        timeout_s: float,
    ) -> None: ...

    def cancel(self, transfer: int, reason: str) -> None: ...

    def take_events(self) -> list[Arrival]: ...

    def counters(self) -> LinkCounters: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Destination of one sender, for which its chunk of each page is the only one."""

    destination: Destination
    chunk: int

    def view(self, stream: Stream, page: int, generation: int, chunk: int) -> memoryview | None:
        assert chunk == 0, "the shape of one sender has one chunk"
        return self.destination.view(stream, page, generation, self.chunk)


@dataclass(slots=True)
class _Transfer:
    """Transfer in parts. due: for each part, streams that have not arrived; none if the part has
    ended. sizes: bytes by part, of pages that have arrived in some parts. failure: why the first
    part failed."""

    due: list[set[Stream]]
    sizes: dict[tuple[Stream, int], dict[int, int]] = field(default_factory=dict)
    failure: str | None = None


class JoinedLink:
    """All links of a receiver as one, with the methods of a ReceiverLoop. Chunk i of a page comes
    from link i, whose sender has no other chunk. A page or a stream has arrived when all chunks
    have. If one part of a transfer fails, the others are cancelled, and TransferFailed follows when
    no part is under way. Calls raise TransportError if one link has ended.

    Owned by one thread."""

    def __init__(self, links: Sequence[PartLink]) -> None:
        self.links = tuple(links)
        self._transfers: dict[int, _Transfer] = {}
        self._events: list[Arrival] = []

    @property
    def num_parts(self) -> int:
        return len(self.links)

    @property
    def refusal(self) -> str | None:
        """Return why the first refused link is refused; None if none is."""
        return next((told for link in self.links if (told := link.refusal) is not None), None)

    @property
    def state(self) -> LinkState:
        states = [link.state for link in self.links]
        if LinkState.REFUSED in states:
            return LinkState.REFUSED
        return LinkState.GREETING if LinkState.GREETING in states else LinkState.LIVE

    def expect(
        self,
        transfer: int,
        pages: Sequence[tuple[int, int]],
        shape: TransferShape,
        destination: Destination,
        timeout_s: float,
    ) -> None:
        """Expect a transfer on all links, like ReceiverLoop. shape: has one chunk for each link."""
        assert shape.num_chunks == self.num_parts
        if (refusal := self.refusal) is not None:
            raise HandshakeRefused(refusal)
        if transfer in self._transfers:
            raise TransportError(f"transfer {transfer} is already expected")
        streams = {stream for stream in Stream if shape.num_pages_of(stream)}
        joined = _Transfer([set(streams) for _ in self.links])
        self._transfers[transfer] = joined
        own_shape = replace(shape, num_chunks=1)
        for part, link in enumerate(self.links):
            try:
                link.expect(transfer, pages, own_shape, _Chunk(destination, part), timeout_s)
            except HandshakeRefused as error:
                for due in joined.due[part:]:
                    due.clear()
                self._fail(transfer, joined, str(error))
                return

    def cancel(self, transfer: int, reason: str) -> None:
        """Cancel all parts of a transfer."""
        joined = self._transfers.get(transfer)
        if joined is not None:
            self._cancel_parts(transfer, joined, reason)

    def take_events(self) -> list[Arrival]:
        for part, link in enumerate(self.links):
            for event in link.take_events():
                joined = self._transfers.get(event.transfer)
                if joined is not None:
                    self._note(joined, part, event)
        events, self._events = self._events, []
        return events

    def counters(self) -> LinkCounters:
        """Return the sums over all links. A transfer counts in each link."""
        return sum_of([link.counters() for link in self.links])

    def close(self) -> None:
        """Close all links. Raises TransportError if one had failed."""
        errors: list[TransportError] = []
        for link in self.links:
            try:
                link.close()
            except TransportError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _note(self, joined: _Transfer, part: int, event: Arrival) -> None:
        if isinstance(event, TransferFailed):
            joined.due[part].clear()
            self._fail(event.transfer, joined, event.reason)
            return
        if isinstance(event, PageArrived):
            self._note_page(joined, part, event)
            return
        joined.due[part].discard(event.stream)
        if joined.failure is not None:
            self._end_failed(event.transfer, joined)
            return
        if not any(event.stream in due for due in joined.due):
            self._events.append(event)
        if not any(joined.due):
            del self._transfers[event.transfer]

    def _note_page(self, joined: _Transfer, part: int, event: PageArrived) -> None:
        place = (event.stream, event.page_index)
        sizes = joined.sizes.setdefault(place, {})
        sizes[part] = event.num_bytes
        if len(sizes) == self.num_parts:
            in_order = tuple(sizes[part] for part in range(self.num_parts))
            self._events.append(PageArrived(event.transfer, *place, in_order))
            del joined.sizes[place]

    def _fail(self, transfer: int, joined: _Transfer, reason: str) -> None:
        if joined.failure is None:
            joined.failure = reason
            self._cancel_parts(transfer, joined, f"another part of the transfer failed: {reason}")
        self._end_failed(transfer, joined)

    def _end_failed(self, transfer: int, joined: _Transfer) -> None:
        if not any(joined.due):
            assert joined.failure is not None
            self._events.append(TransferFailed(transfer, joined.failure))
            del self._transfers[transfer]

    def _cancel_parts(self, transfer: int, joined: _Transfer, reason: str) -> None:
        for link, due in zip(self.links, joined.due, strict=True):
            if due:
                link.cancel(transfer, reason)
