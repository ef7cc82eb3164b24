"""Limits on open transfers: a sender keeps the page list of each until the transfer ends."""

from __future__ import annotations

from collections import Counter

from sglang_kvspec.transport.outgoing import Outgoing

# Limit over all receivers: 64 million tokens in pages of 64.
MAX_OPEN_PAGES = 1 << 20
# Limits for one receiver, over its transfers of which nothing has been offered: only the receiver
# itself vouches for them.
MAX_UNOFFERED_PAGES = 1 << 18
MAX_UNOFFERED_TRANSFERS = 4096


class Openings:
    """Counters of all open pages, and of each receiver's transfers that wait for an offer."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._unoffered_pages: Counter[bytes] = Counter()
        self._unoffered_transfers: Counter[bytes] = Counter()

    def refusal(self, peer: bytes, outgoing: Outgoing, num_pages: int) -> str | None:
        """Return why a receiver may not open a transfer of num_pages pages; None if it may."""
        if self.num_pages + num_pages > MAX_OPEN_PAGES:
            return f"the sender has {self.num_pages} pages open, limit {MAX_OPEN_PAGES}"
        if outgoing.is_offered:
            return None
        if self._unoffered_transfers[peer] >= MAX_UNOFFERED_TRANSFERS:
            return f"the receiver has {MAX_UNOFFERED_TRANSFERS} waiting transfers, the limit"
        pages = self._unoffered_pages[peer]
        if pages + num_pages > MAX_UNOFFERED_PAGES:
            return f"the receiver has {pages} waiting pages, limit {MAX_UNOFFERED_PAGES}"
        return None

    def opened(self, outgoing: Outgoing) -> None:
        self.num_pages += len(outgoing.pages)
        if not outgoing.is_offered:
            self._count_unoffered(outgoing, 1)

    def offered(self, outgoing: Outgoing) -> None:
        """Count the first offer of a transfer that is already open."""
        self._count_unoffered(outgoing, -1)

    def ended(self, outgoing: Outgoing) -> None:
        self.num_pages -= len(outgoing.pages)
        if outgoing.shape is not None and not outgoing.is_offered:
            self._count_unoffered(outgoing, -1)

    def _count_unoffered(self, outgoing: Outgoing, change: int) -> None:
        assert outgoing.peer is not None
        self._unoffered_transfers[outgoing.peer] += change
        self._unoffered_pages[outgoing.peer] += change * len(outgoing.pages)
        if not self._unoffered_transfers[outgoing.peer]:
            # Names of peers that are gone must not pile up.
            del self._unoffered_transfers[outgoing.peer], self._unoffered_pages[outgoing.peer]


class LastAsked:
    """Times of the last Open of transfers of which the sender has nothing to send.

    A receiver repeats its Open while nothing arrives. A receiver that does not repeat it has given
    the transfer up, and its Abort was lost, or it has restarted under its old name.
    """

    def __init__(self) -> None:
        # Oldest first.
        self._at_s: dict[int, float] = {}

    def asked(self, transfer: int, now_s: float) -> None:
        self.forget(transfer)
        self._at_s[transfer] = now_s

    def forget(self, transfer: int) -> None:
        """Stop watching a transfer that has ended, or of which something was offered."""
        self._at_s.pop(transfer, None)

    def take_stale(self, before_s: float) -> list[int]:
        """Return, once, the transfers whose last Open came at or before before_s."""
        stale = []
        for transfer, at_s in self._at_s.items():
            if at_s > before_s:
                break
            stale.append(transfer)
        for transfer in stale:
            self.forget(transfer)
        return stale
