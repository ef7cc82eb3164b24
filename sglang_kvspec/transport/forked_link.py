"""A sender's link to several receivers of a transfer. Each has a part of every page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from sglang_kvspec.transport.segments import Part, SegmentKey, number_of, on_the_wire, part_of
from sglang_kvspec.transport.sender import (
    SegmentReleased,
    SendEvent,
    TransferEnded,
    TransferOpened,
)

# Aborted transfers that are remembered, so that a receiver that opens one late is told.
NUM_REMEMBERED = 4096
_OTHER_PARTS = "the transfer is sent in another number of parts"


class WholeLink(Protocol):
    """Link to receivers of whole pages: a SenderLoop."""

    def offer(self, key: SegmentKey, memory: memoryview) -> None: ...

    def abort(self, transfer: int, reason: str) -> None: ...

    def take_events(self) -> list[SendEvent]: ...


@dataclass(slots=True)
class _Transfer:
    """Transfer in parts. begun: parts that were opened or offered. opened: parts that a receiver
    opened. ended: parts that have ended. reason: why the first failed part failed."""

    num_parts: int
    begun: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    reason: str | None = None

    @property
    def is_over(self) -> bool:
        return self.begun <= self.ended


class ForkedLink:
    """A SenderLoop whose transfers may have a receiver for each chunk of a page. A transfer is open
    when all its receivers have opened it, and ends when all its parts have ended. If one part
    fails, the others are aborted. A transfer that is offered before any Open has one receiver.

    Owned by one thread."""

    def __init__(self, link: WholeLink, harmless: Iterable[str] = ()) -> None:
        """harmless: reasons for which one part may end while the others go on."""
        self._link, self._harmless = link, frozenset((None, *harmless))
        self._transfers: dict[int, _Transfer] = {}
        self._given_up: dict[int, str] = {}
        self._events: list[SendEvent] = []

    def offer(self, key: SegmentKey, memory: memoryview) -> None:
        """Offer a chunk, like SenderLoop. Chunk i goes to receiver i if there are several."""
        transfer = self._transfers.get(key.transfer)
        if transfer is None:
            transfer = self._transfers[key.transfer] = _Transfer(num_parts=1)
        if transfer.num_parts == 1:
            transfer.begun.add(0)
            self._link.offer(key, memory)
            return
        number = number_of(key.transfer, Part(key.chunk, transfer.num_parts))
        transfer.begun.add(key.chunk)
        self._link.offer(key._replace(transfer=number, chunk=0), memory)

    def abort(self, transfer: int, reason: str) -> None:
        """Abort all parts of a transfer."""
        self._remember(transfer, reason)
        known = self._transfers.get(transfer)
        if known is None:
            self._link.abort(transfer, reason)
            return
        known.reason = known.reason or reason
        self._abort_parts(transfer, known, reason)
        self._end_if_over(transfer, known, reason)

    def take_events(self) -> list[SendEvent]:
        for event in self._link.take_events():
            if isinstance(event, SegmentReleased):
                self._events.append(SegmentReleased(_as_offered(event.key)))
            elif isinstance(event, TransferOpened):
                self._note_opened(on_the_wire(event.transfer), part_of(event.transfer))
            else:
                part = part_of(event.transfer)
                self._note_ended(on_the_wire(event.transfer), part, event.reason)
        events, self._events = self._events, []
        return events

    def _note_opened(self, number: int, part: Part) -> None:
        if (reason := self._given_up.get(number)) is not None:
            self._link.abort(number_of(number, part), reason)
            return
        transfer = self._transfers.setdefault(number, _Transfer(part.total))
        if transfer.num_parts != part.total:
            self._link.abort(number_of(number, part), _OTHER_PARTS)
            return
        transfer.begun.add(part.place)
        transfer.opened.add(part.place)
        if len(transfer.opened) == transfer.num_parts:
            self._events.append(TransferOpened(number, transfer.num_parts))

    def _note_ended(self, number: int, part: Part, reason: str | None) -> None:
        transfer = self._transfers.get(number)
        if transfer is None or transfer.num_parts != part.total:
            # The part of a receiver that was turned away.
            return
        transfer.ended.add(part.place)
        if reason not in self._harmless and transfer.reason is None:
            transfer.reason = reason
            of_others = f"another part of the transfer failed: {reason}"
            self._remember(number, of_others)
            self._abort_parts(number, transfer, of_others)
        self._end_if_over(number, transfer, reason)

    def _end_if_over(self, number: int, transfer: _Transfer, reason: str | None) -> None:
        if transfer.is_over:
            del self._transfers[number]
            self._events.append(TransferEnded(number, transfer.reason or reason))

    def _abort_parts(self, number: int, transfer: _Transfer, reason: str) -> None:
        """Abort the parts that have not ended, also those that no receiver has opened."""
        for place in set(range(transfer.num_parts)) - transfer.ended:
            self._link.abort(number_of(number, Part(place, transfer.num_parts)), reason)

    def _remember(self, transfer: int, reason: str) -> None:
        self._given_up.setdefault(transfer, reason)
        while len(self._given_up) > NUM_REMEMBERED:
            del self._given_up[next(iter(self._given_up))]


def _as_offered(key: SegmentKey) -> SegmentKey:
    part = part_of(key.transfer)
    if part.total == 1:
        return key
    return key._replace(transfer=on_the_wire(key.transfer), chunk=part.place)
