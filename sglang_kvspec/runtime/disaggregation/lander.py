"""Landing: copies of arrived KV from a request's staging into the pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.page_records import PageRecords, copy_in
from sglang_kvspec.runtime.disaggregation.handover import (
    HEADS_OF_TAIL,
    HandoverFormat,
    common_handover,
)
from sglang_kvspec.runtime.disaggregation.landing import Landing
from sglang_kvspec.runtime.disaggregation.page_wire import PageWire
from sglang_kvspec.transport import Stream

# Most bytes of payloads copied together, unless one page is larger. This bounds the memory of a
# copy beside the staging and the pools: all of a request may land at once.
AT_ONCE_BYTES = 32 << 20


class Lander:
    """Copier from the staging of a Landing into the pools. Its methods update the landing. They
    raise KVSpecError for bytes that are not KV of this server."""

    def __init__(
        self,
        kv: PagedKVCache,
        wire: PageWire,
        handovers: HandoverFormat,
        keep_tail: Callable[[int, torch.Tensor], None],
    ) -> None:
        """keep_tail: called with a last page and its tokens, which it keeps until the request
        runs."""
        self._kv, self._wire, self._handovers = kv, wire, handovers
        self._keep_tail = keep_tail
        sizes = {Stream.ANCHOR: wire.anchor_bytes, Stream.RESIDUAL: wire.residual_bytes}
        self._pages_at_once = {s: max(1, AT_ONCE_BYTES // max(n, 1)) for s, n in sizes.items()}

    def check(
        self, landing: Landing, stream: Stream, index: int, chunk_bytes: Sequence[int]
    ) -> None:
        """Check a page that has arrived; raises TransportError. So ranks that agree to land it all
        can. A handover passes: it is checked when it is read."""
        if index < landing.num_pages and landing.staging is not None:
            self._wire.check(stream, landing.staging.payloads(stream, index, chunk_bytes))

    def read_handover(self, landing: Landing) -> None:
        """Read the handover if it is in the staging. Puts nothing into the pools."""
        arrived = landing.arrived[Stream.ANCHOR]
        if landing.num_pages not in arrived:
            return
        assert landing.staging is not None, "the whole transfer has landed already"
        chunk_bytes = arrived.pop(landing.num_pages)
        payloads = landing.staging.payloads(Stream.ANCHOR, landing.num_pages, chunk_bytes)
        of_part = self._handovers.of_part(len(payloads))
        handovers, tails = zip(*map(of_part.decode, payloads), strict=True)
        landing.handover, landing.tails = common_handover(handovers), list(tails)

    def land_anchors(self, landing: Landing) -> None:
        """Land the anchors in the staging, and the last page."""
        tails, landing.tails = landing.tails, []
        if tails:
            assert landing.handover is not None
            if landing.handover.is_encoded:
                geometry = self._kv.geometry.part(len(tails))
                parts = [PageRecords.of_bytes(geometry, self._kv.codec, tail) for tail in tails]
                copy_in(self._kv, [landing.last_page], PageRecords.joined(parts))
            else:
                self._keep_tail(landing.last_page, torch.cat(tails, dim=HEADS_OF_TAIL))
        self._land(landing, Stream.ANCHOR, sorted(landing.arrived[Stream.ANCHOR]))

    def land_residuals(self, landing: Landing, end: int | None = None) -> None:
        """Land the residuals in the staging whose anchors have landed; the others wait for their
        anchors. end: land residuals of pages before this index only; None for all."""
        assert landing.pages is not None
        known = [
            index
            for index in sorted(landing.arrived[Stream.RESIDUAL])
            if (end is None or index < end) and self._kv.is_encoded(landing.pages[index])
        ]
        self._land(landing, Stream.RESIDUAL, known)

    def _land(self, landing: Landing, stream: Stream, indices: Sequence[int]) -> None:
        arrived, staging, pages = landing.arrived[stream], landing.staging, landing.pages
        count = self._pages_at_once[stream]
        for first in range(0, len(indices), count):
            part = indices[first : first + count]
            assert staging is not None, "the whole transfer has landed already"
            assert pages is not None
            payloads = [staging.payloads(stream, index, arrived[index]) for index in part]
            self._wire.land(stream, [pages[index] for index in part], payloads)
            for index in part:
                del arrived[index]
            landing.missing[stream] -= len(part)
