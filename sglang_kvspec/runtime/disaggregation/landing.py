"""One request's KV on its way in: what has arrived of it, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sglang_kvspec.runtime.disaggregation.handover import Handover
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import Arrival, Destination, Stream, TransferShape


class ReceivingLink(Protocol):
    """What arrivals need of the thread that receives from one sender."""

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
    """Host memory that a transfer arrives in: full pages 0 .. n - 1 and, as page n, the handover.
    Pages of the pools may be freed while bytes arrive, and this may not."""

    def __init__(self, num_pages: int, wire: PageWire, handover_bytes: int) -> None:
        self._num_pages = num_pages
        self.num_residual_pages = num_pages if wire.residual_bytes else 0
        self.shape = TransferShape(
            num_pages=num_pages + 1,
            num_chunks=1,
            anchor_bytes=max(wire.anchor_bytes, handover_bytes),
            residual_bytes=wire.residual_bytes,
            num_residual_pages=self.num_residual_pages,
        )
        self._pages = {
            Stream.ANCHOR: _empty(num_pages, wire.anchor_bytes),
            Stream.RESIDUAL: _empty(num_pages, wire.residual_bytes),
        }
        self._handover = _empty(1, handover_bytes)

    def view(self, stream: Stream, page: int, generation: int, chunk: int) -> memoryview | None:
        return self._row(stream, page).numpy().data

    def payload(self, stream: Stream, page: int, num_bytes: int) -> torch.Tensor:
        """What has arrived: 1-D uint8 [num_bytes], valid until the staging is dropped."""
        return self._row(stream, page)[:num_bytes]

    def _row(self, stream: Stream, page: int) -> torch.Tensor:
        if page == self._num_pages:
            return self._handover[0]
        return self._pages[stream][page]


def _empty(num_pages: int, num_bytes: int) -> torch.Tensor:
    return torch.empty((num_pages, num_bytes), dtype=torch.uint8)


class Landing:
    """pages: those of the pools, by index; None while the request has been set aside. last_page:
    where its tail goes. arrived: pages of each stream that are in the staging only, with their
    bytes. missing: of each stream, pages that have not landed. tail: of the handover, until the
    anchors land."""

    def __init__(
        self, room: int, link: ReceivingLink, pages: Sequence[int], staging: Staging, now_s: float
    ) -> None:
        self.room, self.link = room, link
        self.pages: list[int] | None = list(pages[:-1])
        self.last_page = pages[-1]
        self.staging: Staging | None = staging
        self.num_pages = num_pages = len(pages) - 1
        self.num_residual_pages = staging.num_residual_pages
        self.arrived: dict[Stream, dict[int, int]] = {stream: {} for stream in Stream}
        self.missing = {
            Stream.ANCHOR: num_pages,
            Stream.RESIDUAL: self.num_residual_pages,
        }
        self.handover: Handover | None = None
        self.tail: torch.Tensor | None = None
        self.has_run = False
        self.failure: str | None = None
        self.expected_at = now_s
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
        return self.is_draftable and (self.tail is not None or bool(self.arrived[Stream.ANCHOR]))

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
