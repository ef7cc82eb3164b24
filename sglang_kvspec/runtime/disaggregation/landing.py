"""Incoming KV of one request: what has arrived, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sglang_kvspec.runtime.disaggregation.handover import Handover
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import Arrival, Destination, Stream, TransferShape


class ReceivingLink(Protocol):
    """Interface of the threads that receive from the ranks of one server, as far as arrivals need
    it. Chunk i of a page comes from the i-th of these ranks: an equal share of its KV heads, in
    their order."""

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
    each in num_parts chunks. Pages of the pools may be freed while bytes arrive; the staging is
    not."""

    def __init__(
        self, num_pages: int, wire: PageWire, handover_bytes: int, num_parts: int = 1
    ) -> None:
        """handover_bytes: most bytes of the handover of one part."""
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
        """Return the arrived bytes of each chunk of a page, 1-D uint8, valid until the staging is
        dropped. chunk_bytes: number of bytes in each chunk."""
        return [self._row(stream, page, i)[:size] for i, size in enumerate(chunk_bytes)]

    def _row(self, stream: Stream, page: int, chunk: int) -> torch.Tensor:
        if page == self._num_pages:
            return self._handover[chunk]
        return self._pages[stream][page, chunk]


class Landing:
    """Incoming KV of one request. pages: page ids in the pools, by index; None while the request is
    retracted. last_page: page that the tail goes to. arrived: by stream, pages that are in the
    staging only, with the bytes of their chunks. missing: by stream, number of pages that have not
    landed. tails: tails of the handover, one for each part, until the anchors land."""

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
        """Return True if the handover is read, and all anchors have landed or are in the
        staging."""
        num_arrived = len(self.arrived[Stream.ANCHOR])
        return self.handover is not None and num_arrived == self.missing[Stream.ANCHOR]

    @property
    def has_anchors_to_land(self) -> bool:
        """Return True if all anchors have arrived, and some of them or the tail have not landed."""
        return self.is_draftable and bool(self.tails or self.arrived[Stream.ANCHOR])

    def fail(self, reason: str) -> None:
        """Record that nothing more arrives. The staging stays if it has all anchors: they still
        land if other ranks land theirs."""
        self.failure = reason
        if not self.has_anchors_to_land:
            self.staging = None

    @property
    def is_complete(self) -> bool:
        """Return True if the handover is read and all full pages have landed."""
        return self.handover is not None and not any(self.missing.values())

    @property
    def num_ready_residuals(self) -> int:
        """Number of pages, from the first on, whose residuals have landed or can land. Valid for a
        request whose residuals land in order."""
        arrived = self.arrived[Stream.RESIDUAL]
        end = self.num_residual_pages - self.missing[Stream.RESIDUAL]
        while end in arrived:
            end += 1
        return end

    @property
    def is_over(self) -> bool:
        """Return True if nothing more will be written into the staging."""
        last = Stream.RESIDUAL if self.num_residual_pages else Stream.ANCHOR
        return self.failure is not None or {Stream.ANCHOR, last} <= self.arrived_at.keys()

    @property
    def all_pages(self) -> list[int]:
        return [*(self.pages or ()), self.last_page]

    def summary(self, mode: str) -> dict[str, Any]:
        """Return seconds since the prefill ended, and bytes, by stream, for meta_info."""
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
