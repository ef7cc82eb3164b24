"""Places of anchors in their pool, where not every page has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sglang_kvspec.kv.page_slots import PageSlots
from sglang_kvspec.kv.transfers import sent_together

# Rounds and prefills that did not use a page, after which the page gives up its place to another.
# A running request uses its pages in every round, and a prompt between two chunks in the next
# prefill.
IDLE_USES = 16


@dataclass(slots=True)
class PlaceCounters:
    """Numbers of pages since the server started. freed: pages that no draft reads, whose anchors
    were freed, or not kept to begin with. idle: pages that gave up their places, as no request had
    used them for a time. without: pages that were encoded while no place was free."""

    freed: int = 0
    idle: int = 0
    without: int = 0


class AnchorPlaces:
    """Places 1 .. num_places of encoded pages' anchors. Anchors without a place of their own are
    written to place 0, which nothing reads: drafts leave such pages out, and verifications do not
    need anchors where the target is `exact`.

    With a place for every page, page p has place p, and nothing is looked up.
    """

    def __init__(self, num_pages: int, num_places: int, device: torch.device) -> None:
        """device: of the kernels that encode."""
        self.holds_all = num_places >= num_pages
        self.counters = PlaceCounters()
        self._device = device
        if self.holds_all:
            return
        self._slots = PageSlots(num_pages, num_places, torch.device("cpu"))
        # Pages that are in use, and that no draft will read.
        self._unread: set[int] = set()
        # Number of rounds and prefills, the last one that used each page, and one before which no
        # page becomes idle.
        self._num_uses = 0
        self._last_use = torch.zeros(num_pages + 1, dtype=torch.int64)
        self._none_idle_before = 0
        self._table = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)
        # Entries that the table on the device lacks.
        self._moved: set[int] = set()

    @property
    def num_taken(self) -> int:
        """Return how many pages have a place of their own; 0 where nothing is looked up."""
        return 0 if self.holds_all else len(self._slots)

    def begin(self, pages: Sequence[int]) -> None:
        """Give places to pages that will be encoded, the first ones first, as far as places are
        free or can be taken from pages that no request has used for long."""
        if self.holds_all:
            return
        wanted = [page for page in pages if page not in self._unread]
        if len(wanted) > self._slots.num_free:
            self._take_idle(len(wanted) - self._slots.num_free)
        served = wanted[: self._slots.num_free]
        self._slots.acquire_all(served)
        self._last_use[served] = self._num_uses
        self._moved.update(pages)
        self.counters.without += len(wanted) - len(served)

    def _take_idle(self, count: int) -> None:
        if self._num_uses < self._none_idle_before:
            return
        held = torch.tensor(list(self._slots), dtype=torch.int64)
        last, order = self._last_use[held].sort()
        num_idle = int((last <= self._num_uses - IDLE_USES).sum())
        idle = held[order[: min(num_idle, count)]].tolist()
        if num_idle < len(held):
            # The next one becomes idle no earlier. To look takes 10 ms for 100,000 pages.
            self._none_idle_before = int(last[len(idle)]) + IDLE_USES
        self._slots.release_all(idle)
        self._moved.update(idle)
        self.counters.idle += len(idle)

    def note_use(self, requests: Iterable[torch.Tensor]) -> None:
        """Note a round or a prefill. requests: pages of each request that takes part, int64 on the
        CPU."""
        if self.holds_all:
            return
        self._num_uses += 1
        for pages in requests:
            self._last_use[pages] = self._num_uses

    def free_unread(self, pages: Sequence[int]) -> None:
        """Free the places of pages that no draft will read. Such pages get none either if they are
        encoded later."""
        if self.holds_all:
            return
        new = set(pages) - self._unread
        self._slots.release_all(new)
        self._moved.update(new)
        self._unread |= new
        self.counters.freed += len(new)

    def release(self, pages: Iterable[int]) -> None:
        """Forget pages that SGLang freed."""
        if self.holds_all:
            return
        pages = list(pages)
        self._slots.release_all(pages)
        self._moved.update(pages)
        self._unread.difference_update(pages)

    # Lookups

    def have(self, pages: torch.Tensor) -> torch.Tensor:
        """Return which of these pages have anchors if they are encoded, bool. pages: int64 on the
        CPU, of any shape, as below."""
        if self.holds_all:
            return torch.ones_like(pages, dtype=torch.bool)
        return self._slots.table[pages] >= 0

    def of(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the places of pages, and 0 for a page without one."""
        return pages if self.holds_all else self._slots.table[pages] + 1

    def on_device(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the places of pages [N], both int32 on the device: 0 for a page without one, and
        -1 for an entry of -1, which is no page."""
        if self.holds_all:
            return pages
        return torch.where(pages < 0, pages, self._table.index_select(0, pages.clamp(min=0)))

    def sync(self) -> None:
        """Send changed places to the device, for kernels launched after this call."""
        if self.holds_all or not self._moved:
            return
        moved = torch.tensor(sorted(self._moved))
        self._table.index_copy_(0, *sent_together(self._device, [moved, self.of(moved).int()]))
        self._moved.clear()

    def check_integrity(self, encoded: set[int]) -> None:
        """encoded: the encoded pages."""
        if self.holds_all:
            return
        self._slots.check_integrity()
        held = set(self._slots)
        assert held <= encoded, "a page that is not encoded has a place for anchors"
        assert held.isdisjoint(self._unread), "anchors that no draft reads have a place"
        told = torch.tensor(sorted(held - self._moved), dtype=torch.int64)
        assert torch.equal(self._table[told.to(self._device)].cpu(), self.of(told).int()), (
            "the table of places on the device is out of date"
        )
