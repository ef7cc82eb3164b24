"""Slots handed out to pages, for pools that hold fewer pages than SGLang allocates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from sglang_kvspec.core.errors import CapacityError


class PageSlots:
    """One-to-one map from some pages to slots 0..num_slots-1, in the order of assignment."""

    def __init__(self, num_pages: int, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._slot_of_page: dict[int, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._table = torch.full((num_pages + 1,), -1, dtype=torch.int64, device=device)
        # Entries that the table lacks. They are written when the table is read, and not before.
        self._changed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of_page)

    def __contains__(self, page: int) -> bool:
        return page in self._slot_of_page

    def __iter__(self) -> Iterator[int]:
        """Yield the pages in the order in which they got their slots."""
        return iter(self._slot_of_page)

    @property
    def table(self) -> torch.Tensor:
        """Slot of each page as a tensor [num_pages + 1] int64, -1 where a page has no slot, for
        gathers without Python loops."""
        if self._changed:
            device = self._table.device
            pages = torch.tensor(list(self._changed), device=device)
            self._table[pages] = torch.tensor(list(self._changed.values()), device=device)
            self._changed.clear()
        return self._table

    def slot_of(self, page: int) -> int:
        """Return the slot of a page that has one."""
        return self._slot_of_page[page]

    def slots_of(self, pages: Iterable[int]) -> list[int]:
        """Return the slots of pages, and any slot for a page that has none."""
        find = self._slot_of_page.get
        return [find(page, 0) for page in pages]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, page: int) -> int:
        """Give `page` a slot. Raises CapacityError when none is free."""
        assert page not in self._slot_of_page, f"page {page} already has a slot"
        if not self._free:
            raise CapacityError(f"no free slot for page {page}: all {self.num_slots} are taken")
        slot = self._free.pop()
        self._slot_of_page[page] = slot
        self._changed[page] = slot
        return slot

    def acquire_all(self, pages: Sequence[int]) -> list[int]:
        """Give each of these pages a slot, and return the slots. They ascend, so that neighbours
        among the pages are neighbours in memory where that is possible. Raises CapacityError, and
        gives none, when too few are free."""
        if len(pages) > self.num_free:
            raise CapacityError(
                f"no free slot for {len(pages) - self.num_free} of {len(pages)} pages: all "
                f"{self.num_slots} are taken"
            )
        assert self._slot_of_page.keys().isdisjoint(pages), "a page already has a slot"
        assert len(set(pages)) == len(pages), "a page is given twice"
        first = self.num_free - len(pages)
        slots = sorted(self._free[first:])
        del self._free[first:]
        given = dict(zip(pages, slots, strict=True))
        self._slot_of_page.update(given)
        self._changed.update(given)
        return slots

    def release_all(self, pages: Iterable[int]) -> None:
        """Free the slot of each of these pages that has one."""
        held = [page for page in dict.fromkeys(pages) if page in self._slot_of_page]
        self._free += [self._slot_of_page.pop(page) for page in held]
        self._changed.update(dict.fromkeys(held, -1))

    def release(self, page: int) -> bool:
        """Free the slot of `page`. Return False if it had none."""
        slot = self._slot_of_page.pop(page, None)
        if slot is None:
            return False
        self._free.append(slot)
        self._changed[page] = -1
        return True

    def check_integrity(self) -> None:
        taken = set(self._slot_of_page.values())
        assert len(taken) == len(self._slot_of_page), "a slot belongs to two pages"
        assert taken.isdisjoint(self._free), "a free slot belongs to a page"
        assert len(taken) + len(self._free) == self.num_slots, (
            "taken and free slots are not all slots"
        )
        held = (self.table >= 0).nonzero().flatten().tolist()
        assert sorted(held) == sorted(self._slot_of_page), (
            "the slot table disagrees with the map of pages"
        )


class OwnSlots(PageSlots):
    """Slots for all pages: page p has slot p - 1, so that no lookup is needed. Page 0, SGLang's
    padding page, has none."""

    def __init__(self, num_pages: int, device: torch.device) -> None:
        super().__init__(0, 0, device)
        self.num_slots = num_pages
        self._table = torch.arange(-1, num_pages, device=device)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self)

    def acquire(self, page: int) -> int:
        assert page not in self._slot_of_page, f"page {page} already has a slot"
        assert 0 < page <= self.num_slots, f"there is no slot for page {page}"
        self._slot_of_page[page] = page - 1
        return page - 1

    def acquire_all(self, pages: Sequence[int]) -> list[int]:
        return [self.acquire(page) for page in pages]

    def release(self, page: int) -> bool:
        return self._slot_of_page.pop(page, None) is not None

    def release_all(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.release(page)

    def check_integrity(self) -> None:
        assert all(slot == page - 1 for page, slot in self._slot_of_page.items())
