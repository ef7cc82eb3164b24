"""Outgoing KV: pages of requests that this server computes and another server decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.page_records import copy_out
from sglang_kvspec.runtime.disaggregation.handover import (
    HEADS_OF_TAIL,
    Handover,
    HandoverFormat,
    digest_of,
)
from sglang_kvspec.runtime.disaggregation.outbox import READY_BYTES, Outbox
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import (
    SegmentKey,
    SegmentReleased,
    SendEvent,
    Stream,
    TransferEnded,
    TransferOpened,
)

# Reason that a receiver gives when its request is over. The sender does not count it as a failure.
NOT_NEEDED = "the receiver needs no more of it"
FREED = "the KV was freed before the transfer ended"
# Most open rooms without a request here. Receivers of requests that never come give up long before
# this limit.
MAX_UNCLAIMED = 4096


class SendingLink(Protocol):
    """Interface of the thread that sends, as far as departures need it. Chunk i of a page goes to
    the i-th receiver; TransferOpened gives the number of receivers."""

    def offer(self, key: SegmentKey, memory: memoryview) -> None: ...

    def abort(self, transfer: int, reason: str) -> None: ...

    def take_events(self) -> list[SendEvent]: ...


@dataclass(slots=True)
class Departure:
    """Outgoing transfer of one request. prompt: digest of its token ids, once they are computed.
    prefill_ended_at: time at which the last of them was. num_sent: pages that went to the outbox or
    the link. num_parts: receivers, each of an equal share of the KV heads. ended: why the transfer
    is over, "" for success, None while it runs."""

    prompt: bytes | None = None
    prefill_ended_at: float = 0.0
    num_sent: int = 0
    is_open: bool = False
    num_parts: int = 1
    ended: str | None = None
    num_bytes: int = 0
    begun_s: float = 0.0
    took_s: float | None = None


class Departures:
    """Outgoing transfers of a prefill server, owned by the scheduler's thread. Rooms are SGLang's
    bootstrap rooms, and the transport's transfer numbers. SGLang keeps a request's pages until its
    transfer has ended, so pages wait in the KV cache until the outbox has room."""

    def __init__(
        self,
        kv: PagedKVCache,
        wire: PageWire,
        link: SendingLink,
        handovers: HandoverFormat,
        clock: Callable[[], float] = time.time,
        *,
        ready_bytes: int = READY_BYTES,
    ) -> None:
        """ready_bytes: most bytes of each stream that wait for the link in host memory, beside one
        portion and the last page of each request (Outbox)."""
        self._kv, self._link = kv, link
        self._handovers, self._clock = handovers, clock
        self.outbox = Outbox(wire, self._offer, ready_bytes)
        self._departures: dict[int, Departure] = {}
        # Rooms that were opened before their request came here, with their numbers of receivers.
        self._unclaimed: dict[int, int] = {}

    def add(self, room: int) -> Departure:
        """Register a request that is to be sent. Raises ValueError for a room that is in use."""
        if room in self._departures:
            raise ValueError(f"bootstrap room {room} is already in use: choose another")
        self.pump()
        departure = Departure(begun_s=self._clock())
        num_parts = self._unclaimed.pop(room, None)
        if num_parts is not None:
            departure.is_open, departure.num_parts = True, num_parts
        self._departures[room] = departure
        return departure

    def of(self, room: int) -> Departure:
        return self._departures[room]

    def note_prompt(self, room: int, token_ids: Sequence[int]) -> None:
        """Record a request's prompt tokens and the time, as soon as all their KV is computed. Call
        this before send_last(). An unknown room is ignored: SGLang's warm-up has such rooms."""
        departure = self._departures.get(room)
        if departure is not None:
            departure.prompt, departure.prefill_ended_at = digest_of(token_ids), self._clock()

    def send(self, room: int, pages: Sequence[int]) -> None:
        """Send the next full pages of a request, unless its transfer has ended. The pages are
        encoded in any case: another rank may still send its part of them, and pools must be
        alike."""
        departure = self._departures[room]
        self._kv.encode_committed(pages)
        if departure.ended is None:
            self._add(room, departure, pages)
            self._pack()

    def send_last(
        self, room: int, pages: Sequence[int], num_tokens: int, fields: tuple[bytes, ...]
    ) -> None:
        """Send the rest of a request's pages and the handover, ahead of residuals. num_tokens:
        computed tokens on the last page. fields: SGLang's state of the first token. If an equal
        prefix was cached, SGLang has put its page in place of the one that the last chunk wrote.
        That page is encoded."""
        departure = self._departures[room]
        *full_pages, page = pages
        self._kv.encode_committed(full_pages)
        if departure.ended is not None:
            return
        self._add(room, departure, full_pages)
        self._pack([Stream.ANCHOR])
        if departure.ended is not None:
            return
        tails, is_encoded = self._tails(page, num_tokens, departure.num_parts)
        assert departure.prompt is not None, "the handover needs the digest of the prompt"
        ended_at = departure.prefill_ended_at
        handover = Handover(fields, departure.prompt, ended_at, num_tokens, is_encoded)
        for chunk, tail in enumerate(tails):
            data = self._handovers.encode(handover, tail)
            self._offer(SegmentKey(room, Stream.ANCHOR, departure.num_sent, chunk), data)
        departure.num_sent += 1
        self._pack()

    def pump(self) -> None:
        """Process the events of the link, and pack pages while the outbox has room."""
        for event in self._link.take_events():
            if isinstance(event, SegmentReleased):
                self.outbox.released(event.key)
                continue
            departure = self._departures.get(event.transfer)
            if isinstance(event, TransferOpened):
                if departure is not None:
                    departure.is_open, departure.num_parts = True, event.num_parts
                elif len(self._unclaimed) < MAX_UNCLAIMED:
                    self._unclaimed[event.transfer] = event.num_parts
            elif isinstance(event, TransferEnded):
                self._unclaimed.pop(event.transfer, None)
                self.outbox.drop(event.transfer)
                if departure is not None:
                    departure.ended = "" if event.reason in (None, NOT_NEEDED) else event.reason
                    departure.took_s = self._clock() - departure.begun_s
        self._pack()

    def release(self, pages: Iterable[int]) -> None:
        """Abort the requests that have yet to send some of these pages, which SGLang freed."""
        for room in self.outbox.rooms_of(pages):
            self.abort(room, FREED)

    def abort(self, room: int, reason: str) -> None:
        """Cancel a request's transfer, here and at its receivers."""
        departure = self._departures.get(room)
        if departure is not None and departure.ended is None:
            departure.ended = reason
            self.outbox.drop(room)
            self._link.abort(room, reason)

    def abort_all(self, reason: str) -> None:
        """Cancel all transfers that have not ended: incomplete KV must not be used."""
        for room in self._departures:
            self.abort(room, reason)

    def forget(self, room: int) -> None:
        """Forget a request that is over, and cancel its transfer if that has not ended."""
        self.abort(room, "the request has ended")
        self._departures.pop(room, None)

    def _tails(
        self, page: int, num_tokens: int, num_parts: int
    ) -> tuple[Sequence[torch.Tensor], bool]:
        """Return a request's last page as HandoverFormat takes it, a tensor for each part, and
        whether these are records."""
        tail = self._kv.records.read_plain(page, num_tokens)
        if tail is not None:
            return tail.chunk(num_parts, dim=HEADS_OF_TAIL), False
        assert num_tokens == self._kv.geometry.page_size
        parts = copy_out(self._kv, [page]).parts(num_parts)
        return [torch.cat([each.reshape(-1) for each in part]) for part in parts], True

    def _add(self, room: int, departure: Departure, pages: Sequence[int]) -> None:
        self.outbox.add(room, departure.num_sent, pages, departure.num_parts)
        departure.num_sent += len(pages)

    def _pack(self, streams: Iterable[Stream] = Stream) -> None:
        for room, reason in self.outbox.pack(streams).items():
            self.abort(room, reason)

    def _offer(self, key: SegmentKey, payload: torch.Tensor) -> None:
        self._departures[key.transfer].num_bytes += payload.nbytes
        self._link.offer(key, payload.numpy().data)
