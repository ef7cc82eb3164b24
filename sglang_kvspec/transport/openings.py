"""How much receivers may have open: a sender keeps pages of every Open until its transfer ends."""

from __future__ import annotations

from collections import Counter

from sglang_kvspec.transport.outgoing import Outgoing

# Of all receivers: 64 million tokens in pages of 64.
MAX_OPEN_PAGES = 1 << 20
# Of one receiver, in transfers of which nothing has been offered: nothing here speaks for those but
# the receiver itself.
MAX_UNOFFERED_PAGES = 1 << 18
MAX_UNOFFERED_TRANSFERS = 4096


class Openings:
    """Counts the open transfers of all receivers, and of each those that wait for an offer."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._unoffered_pages: Counter[bytes] = Counter()
        self._unoffered_transfers: Counter[bytes] = Counter()

    def refusal(self, peer: bytes, outgoing: Outgoing, num_pages: int) -> str | None:
        """Why a receiver may not open one more transfer, of so many pages; None if it may."""
        if self.num_pages + num_pages > MAX_OPEN_PAGES:
            return f"the sender has {self.num_pages} pages open, limit {MAX_OPEN_PAGES}"
        if outgoing.is_offered:
            return None
        if self._unoffered_transfers[peer] >= MAX_UNOFFERED_TRANSFERS:
            return f"the receiver has {MAX_UNOFFERED_TRANSFERS} transfers that wait, the limit"
        pages = self._unoffered_pages[peer]
        if pages + num_pages > MAX_UNOFFERED_PAGES:
            return f"the receiver has {pages} pages that wait, limit {MAX_UNOFFERED_PAGES}"
        return None

    def opened(self, outgoing: Outgoing) -> None:
        self.num_pages += len(outgoing.pages)
        if not outgoing.is_offered:
            self._count_unoffered(outgoing, 1)

    def offered(self, outgoing: Outgoing) -> None:
        """The first offer of a transfer comes after its Open."""
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
    """Open transfers of which the sender has nothing to send, by when their receiver last asked. A
    receiver repeats its Open while nothing comes: one that does not wants it no more, though its
    Abort was lost, or it has restarted under its old name."""

    def __init__(self) -> None:
        # The longest ago first.
        self._at_s: dict[int, float] = {}

    def asked(self, transfer: int, now_s: float) -> None:
        self.forget(transfer)
        self._at_s[transfer] = now_s

    def forget(self, transfer: int) -> None:
        """It is over, or something was offered: what comes of that will tell."""
        self._at_s.pop(transfer, None)

    def take_stale(self, before_s: float) -> list[int]:
        """Those that nobody has asked for since then; they are not told twice."""
        stale = []
        for transfer, at_s in self._at_s.items():
            if at_s > before_s:
                break
            stale.append(transfer)
        for transfer in stale:
            self.forget(transfer)
        return stale
