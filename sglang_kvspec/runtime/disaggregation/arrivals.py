"""Incoming KV: pages of requests that another server computes, landing in this server's pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_kvspec.core.errors import KVSpecError, TransportError
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED
from sglang_kvspec.runtime.disaggregation.handover import HandoverFormat, digest_of
from sglang_kvspec.runtime.disaggregation.lander import Lander
from sglang_kvspec.runtime.disaggregation.landing import Landing, ReceivingLink, Staging
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.runtime.disaggregation.timeline import Timeline
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.transport import Arrival, PageArrived, StreamArrived, TransferFailed

# Number that a rank sends for a request that failed there, in place of its number of pages.
_FAILED = -1
ON_ANOTHER_RANK = "another rank of this server failed to receive its part; see the log of that rank"


class Arrivals:
    """Incoming transfers of a decode server, owned by the scheduler's thread, as the pools are.
    Rooms are SGLang's bootstrap rooms, and the transport's transfer numbers. Bytes arrive in a
    staging of each request, and pump() lands them: pages may be freed and reused at any time.

    Several ranks each have their own link, but plan from the state of their pools, which must be
    equal. So what arrives on one rank stays in its staging until all ranks have it: anchors until
    land_anchors(), residuals until land_together().
    """

    def __init__(
        self,
        kv: PagedKVCache,
        wire: PageWire,
        handovers: HandoverFormat,
        *,
        mode: str,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """mode: value of --kvspec-transfer, for summary(). ranks: ranks of this server; None for
        one rank."""
        self._kv, self._wire, self._handovers = kv, wire, handovers
        self._mode, self._ranks, self._clock = mode, ranks or Ranks(), clock
        self._lander = Lander(kv, wire, handovers, self.keep_tail)
        self._landings: dict[int, Landing] = {}
        self._by_page: dict[int, Landing] = {}
        # Tails of requests that do not run yet, by page: [num_layers, 2, num_tokens, num_kv_heads,
        # head_dim]. The recent window has room only for requests that run.
        self._tails: dict[int, torch.Tensor] = {}
        # Requests dropped here, while bytes of them may still arrive.
        self._leaving: dict[int, Landing] = {}

    def __len__(self) -> int:
        """Return the number of requests whose KV is not complete."""
        return sum(not landing.is_complete for landing in self._landings.values())

    def expect(
        self, room: int, link: ReceivingLink, pages: Sequence[int], timeout_s: float
    ) -> None:
        """Have a request's KV sent into free pages, in order; the last one takes the tail. Raises
        ValueError for a room that is in use."""
        if room in self._landings or room in self._leaving:
            raise ValueError(f"bootstrap room {room} is already in use: choose another")
        handover_bytes = self._handovers.of_part(link.num_parts).max_bytes
        staging = Staging(len(pages) - 1, self._wire, handover_bytes, link.num_parts)
        landing = Landing(room, link, pages, staging)
        rows = [(index, 0) for index in range(len(pages))]
        link.expect(room, rows, staging.shape, staging, timeout_s)
        self._landings[room] = landing
        self._by_page.update(dict.fromkeys(pages, landing))

    def pump(self, link: ReceivingLink) -> None:
        """Process the events of a link, and land what has arrived if there is only one rank. Raises
        TransportError if the link is broken."""
        touched: dict[int, Landing] = {}
        for event in link.take_events():
            landing = self._landings.get(event.transfer) or self._leaving.get(event.transfer)
            if landing is None or landing.link is not link:
                continue
            with self._distrusting(landing):
                self._note(landing, event)
            if event.transfer in self._landings:
                touched[event.transfer] = landing
            elif landing.is_over:
                self._leaving.pop(event.transfer, None)
        for landing in touched.values():
            self._follow(landing)

    def land_anchors(self, room: int) -> None:
        """Land the anchors of a request that will run here, after is_draftable() held on all ranks.
        They land even if the request has failed since: on other ranks they do. Nothing happens if
        they have landed, or the room is unknown."""
        landing = self._landings.get(room)
        if landing is not None and landing.has_anchors_to_land:
            with self._distrusting(landing):
                self._lander.land_anchors(landing)
            self._drop_staging(landing)

    def land_together(self, rooms: Sequence[int]) -> None:
        """Land residuals as far as all ranks have them, and fail requests that failed on any rank.
        rooms: running requests whose residuals have not all landed; the same on all ranks."""
        if self._ranks.size == 1 or not rooms:
            return
        landings = [self._landings[room] for room in rooms]
        mine = [
            _FAILED if each.failure is not None else each.num_ready_residuals for each in landings
        ]
        common = self._ranks.least(mine, about=("residuals", *rooms))
        for landing, num_pages in zip(landings, common, strict=True):
            if num_pages != _FAILED:
                with self._distrusting(landing):
                    self._lander.land_residuals(landing, num_pages)
                self._drop_staging(landing)
            elif landing.failure is None:
                self._fail(landing, ON_ANOTHER_RANK)

    def is_draftable(self, room: int) -> bool:
        landing = self._landings.get(room)
        return landing is not None and landing.is_draftable and landing.failure is None

    def is_pending(self, room: int) -> bool:
        """Return True if some of a request's residuals have not landed."""
        landing = self._landings.get(room)
        return landing is not None and not landing.is_complete

    def failure(self, room: int) -> str | None:
        """Return why a request cannot continue. None if it can, is complete, or is unknown."""
        landing = self._landings.get(room)
        return None if landing is None else landing.failure

    def fields(self, room: int) -> tuple[bytes, ...]:
        """Return SGLang's state of a draftable request after its first token."""
        handover = self._landings[room].handover
        assert handover is not None
        return handover.fields

    def admit(self, room: int, last_page: int) -> Timeline | None:
        """Put the tail of a draftable request that starts, or of a retracted one that resumes, into
        the recent window. Return its timeline, None if it ran before or is unknown. Raises
        CapacityError if the window is full."""
        tail = self._tails.pop(last_page, None)
        if tail is not None:
            self._kv.records.write_plain(last_page, tail)
        landing = self._landings.get(room)
        if landing is None or landing.has_run:
            return None
        assert landing.handover is not None
        landing.has_run = True
        return Timeline(landing.handover.prefill_ended_at)

    def wrong_prompt(self, room: int, token_ids: Sequence[int]) -> str | None:
        """Return why a draftable request with these prompt tokens must not run: the prefill server
        computed another prompt. None if it may run, or ran before."""
        landing = self._landings.get(room)
        if landing is None or landing.has_run:
            return None
        assert landing.handover is not None
        full_tokens = landing.num_pages * self._kv.geometry.page_size
        num_sent = full_tokens + landing.handover.num_tail_tokens
        if num_sent != len(token_ids):
            return (
                f"the prefill server sent KV of {num_sent} tokens, the prompt has {len(token_ids)}"
            )
        if landing.handover.prompt != digest_of(token_ids):
            return "the prefill server computed another prompt of the same length"
        return None

    def keep_tail(self, page: int, tail: torch.Tensor) -> None:
        """Keep the tail of a last page until the page's request runs."""
        self._tails[page] = tail

    def keep_retracted(self, page: int) -> int:
        """Stop landing the request that has this page and is retracted. Returns its room."""
        landing = self._by_page[page]
        for each in landing.all_pages:
            self._by_page.pop(each, None)
        landing.pages = None
        return landing.room

    def restore(self, room: int, pages: Sequence[int]) -> None:
        """Resume a retracted request in these pages, which hold what had landed. KV that still
        arrives goes into the first of them."""
        landing = self._landings.get(room)
        if landing is None:
            return
        landing.pages = list(pages[: landing.num_pages])
        landing.last_page = pages[landing.num_pages]
        self._by_page.update(dict.fromkeys(landing.all_pages, landing))
        self._follow(landing)

    def summary(self, room: int) -> dict[str, Any]:
        """Return times and bytes of a draftable request's transfer."""
        return self._landings[room].summary(self._mode)

    def is_used(self, link: ReceivingLink) -> bool:
        """Return True if a transfer on this link is under way."""
        return any(
            landing.link is link and not landing.is_complete
            for landing in (*self._landings.values(), *self._leaving.values())
        )

    def fail_all_of(self, link: ReceivingLink, reason: str) -> None:
        """Fail the requests that still need a link, which was closed."""
        for landing in self._landings.values():
            if landing.link is link and not (landing.is_complete or landing.is_over):
                landing.fail(reason)
        self._leaving = {r: left for r, left in self._leaving.items() if left.link is not link}

    def release(self, pages: Iterable[int]) -> None:
        """Drop the requests that were to land in these pages, which SGLang freed."""
        for page in pages:
            self._tails.pop(page, None)
            landing = self._by_page.get(page)
            if landing is not None:
                self.drop(landing.room, NOT_NEEDED)

    def drop(self, room: int, reason: str) -> None:
        """Forget a request, and cancel the rest of its transfer. An unknown room is ignored."""
        landing = self._landings.pop(room, None)
        if landing is None:
            return
        for page in landing.all_pages:
            # Pages of a retracted request may belong to another request by now.
            if self._by_page.get(page) is landing:
                del self._by_page[page]
        if landing.staging is not None and not landing.is_over:
            self._leaving[room] = landing
            self._cancel(landing, reason)

    def fail_all(self, reason: str) -> None:
        """Fail all requests whose KV is not complete."""
        for landing in self._landings.values():
            if not landing.is_complete and landing.failure is None:
                self._fail(landing, reason)

    def note_failure(self, room: int, reason: str) -> None:
        """Record that a request's transfer has failed: nothing more arrives, and its sender knows.
        An unknown room is ignored."""
        landing = self._landings.get(room) or self._leaving.get(room)
        # A complete request needs nothing more, and must not fail on a single rank.
        if landing is not None and not landing.is_complete:
            landing.fail(reason)

    def _cancel(self, landing: Landing, reason: str) -> None:
        try:
            landing.link.cancel(landing.room, reason)
        except TransportError:
            # The link's thread has ended, and writes no more. pump() reports why.
            self._leaving.pop(landing.room, None)

    def _fail(self, landing: Landing, reason: str) -> None:
        landing.fail(reason)
        self._cancel(landing, reason)

    @contextmanager
    def _distrusting(self, landing: Landing) -> Iterator[None]:
        """Fail a request if bytes arrive that are not of the agreed kind: none of its bytes can be
        trusted."""
        try:
            yield
        except KVSpecError as error:
            self._fail(landing, f"the received bytes are not KV of this request: {error}")

    def _note(self, landing: Landing, event: Arrival) -> None:
        if isinstance(event, TransferFailed):
            self.note_failure(event.transfer, event.reason)
        elif isinstance(event, PageArrived):
            self._lander.check(landing, event.stream, event.page_index, event.chunk_bytes)
            landing.arrived[event.stream][event.page_index] = event.chunk_bytes
            landing.num_bytes[event.stream] += event.num_bytes
        elif isinstance(event, StreamArrived):
            landing.arrived_at[event.stream] = self._clock()

    def _follow(self, landing: Landing) -> None:
        """Read the handover if it has arrived. If there is only one rank, land what has arrived."""
        if landing.failure is not None or landing.pages is None:
            return
        with self._distrusting(landing):
            self._lander.read_handover(landing)
            if self._ranks.size == 1:
                self._lander.land_anchors(landing)
                self._lander.land_residuals(landing)
        self._drop_staging(landing)

    @staticmethod
    def _drop_staging(landing: Landing) -> None:
        """Free the staging if nothing more lands from it."""
        has_failed = landing.failure is not None and not landing.has_anchors_to_land
        if landing.is_complete or has_failed:
            landing.staging = None
