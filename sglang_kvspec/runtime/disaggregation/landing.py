"""One request's KV on its way in: what has arrived of it, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sglang_kvspec.runtime.disaggregation.handover import Handover
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import Arrival, Destination, Stream, TransferShape


class ReceivingLink(Protocol):
    """What arrivals need of the threads that receive from the ranks of one server. Chunk i of a
    page is what the i-th of them sends: an equal share of its KV heads, in their order."""

    @property
    def num_parts(self) -> int: ...

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


class Staging:
    """Host memory that a transfer arrives in: full pages 0 .. n - 1 and, as page n, the handover,
    each in num_parts chunks. Pages of the pools may be freed while bytes arrive, and this may
    not."""

    def __init__(
        self, num_pages: int, wire: PageWire, handover_bytes: int, num_parts: int = 1
    ) -> None:
        """handover_bytes: of one part."""
        self._num_pages = num_pages
        self.num_residual_pages = num_pages if wire.residual_bytes else 0
        page_bytes = {stream: wire.part_bytes(stream, num_parts) for stream in Stream}
        self.shape = TransferShape(
            num_pages=num_pages + 1,
            num_chunks=num_parts,
            anchor_bytes=max(page_bytes[Stream.ANCHOR], handover_bytes),
            residual_bytes=page_bytes[Stream.RESIDUAL],
            num_residual_pages=self.num_residual_pages,
        )
        self._pages = {
            stream: torch.empty((num_pages, num_parts, size), dtype=torch.uint8)
            for stream, size in page_bytes.items()
        }
        self._handover = torch.empty((num_parts, handover_bytes), dtype=torch.uint8)

    def view(self, stream: Stream, page: int, generation: int, chunk: int) -> memoryview | None:
        return self._row(stream, page, chunk).numpy().data

    def payloads(self, stream: Stream, page: int, chunk_bytes: Sequence[int]) -> list[torch.Tensor]:
        """What has arrived: of each chunk so many bytes, 1-D uint8, valid until the staging is
        dropped."""
        return [self._row(stream, page, i)[:size] for i, size in enumerate(chunk_bytes)]

    def _row(self, stream: Stream, page: int, chunk: int) -> torch.Tensor:
        if page == self._num_pages:
            return self._handover[chunk]
        return self._pages[stream][page, chunk]


class Landing:
    """pages: those of the pools, by index; None while the request has been set aside. last_page:
    where its tail goes. arrived: pages of each stream that are in the staging only, with the bytes
    of their chunks. missing: of each stream, pages that have not landed. tails: of the handover, a
    part each, until the anchors land."""

    def __init__(
        self, room: int, link: ReceivingLink, pages: Sequence[int], staging: Staging
    ) -> None:
        self.room, self.link = room, link
        self.pages: list[int] | None = list(pages[:-1])
        self.last_page = pages[-1]
        self.staging: Staging | None = staging
        self.num_pages = num_pages = len(pages) - 1
        self.num_residual_pages = staging.num_residual_pages
        self.arrived: dict[Stream, dict[int, tuple[int, ...]]] = {stream: {} for stream in Stream}
        self.missing = {
            Stream.ANCHOR: num_pages,
            Stream.RESIDUAL: self.num_residual_pages,
        }
        self.handover: Handover | None = None
        self.tails: list[torch.Tensor] = []
        self.has_run = False
        self.failure: str | None = None
        self.arrived_at: dict[Stream, float] = {}
        self.num_bytes = dict.fromkeys(Stream, 0)

    @property
    def is_draftable(self) -> bool:
        """All that drafting needs has landed, or can."""
        num_arrived = len(self.arrived[Stream.ANCHOR])
        return self.handover is not None and num_arrived == self.missing[Stream.ANCHOR]

    @property
    def has_anchors_to_land(self) -> bool:
        """All of them are here, and not all in the pools."""
        return self.is_draftable and bool(self.tails or self.arrived[Stream.ANCHOR])

    def fail(self, reason: str) -> None:
        """Nothing more comes. Anchors may land nevertheless, where other ranks let theirs."""
        self.failure = reason
        if not self.has_anchors_to_land:
            self.staging = None

    @property
    def is_complete(self) -> bool:
        """All of it has landed, but for the tail."""
        return self.handover is not None and not any(self.missing.values())

    @property
    def num_ready_residuals(self) -> int:
        """Pages from the first one on whose residuals have landed, or can. Of a request whose
        residuals land in order."""
        arrived = self.arrived[Stream.RESIDUAL]
        end = self.num_residual_pages - self.missing[Stream.RESIDUAL]
        while end in arrived:
            end += 1
        return end

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written into its staging."""
        last = Stream.RESIDUAL if self.num_residual_pages else Stream.ANCHOR
        return self.failure is not None or {Stream.ANCHOR, last} <= self.arrived_at.keys()

    @property
    def all_pages(self) -> list[int]:
        return [*(self.pages or ()), self.last_page]

    def summary(self, mode: str) -> dict[str, Any]:
        """For meta_info: seconds since the prefill ended, and bytes, by stream."""
        assert self.handover is not None
        zero = self.handover.prefill_ended_at

        def after(stream: Stream) -> float | None:
            at = self.arrived_at.get(stream)
            return None if at is None else at - zero

        return {
            "mode": mode,
            "seconds": {"anchors": after(Stream.ANCHOR), "residuals": after(Stream.RESIDUAL)},
            "bytes": {
                "anchors": self.num_bytes[Stream.ANCHOR],
                "residuals": self.num_bytes[Stream.RESIDUAL],
            },
        }
