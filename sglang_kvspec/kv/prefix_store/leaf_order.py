"""Order of eviction in a forest of pages: the least recently used leaf first."""

from __future__ import annotations

import heapq
from collections import defaultdict


class LeafOrder:
    """Keys with their parents, and when each was last used. A key's parent need not be here: it
    may have been lost, and may be added again."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}
        self._used: dict[bytes, int] = {}
        # Only keys that have children.
        self._num_children: defaultdict[bytes, int] = defaultdict(int)
        # Heap of (last use, key): one pair for every leaf, and outdated pairs.
        self._heap: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, key: bytes, parent: bytes, now: int) -> None:
        assert key not in self._parents, "a page was added twice"
        self._parents[key] = parent
        self._num_children[parent] += 1
        self.touch(key, now)

    def touch(self, key: bytes, now: int) -> None:
        """Mark the page as used at `now`, which never decreases from call to call."""
        self._used[key] = now
        if key not in self._num_children:
            self._offer(key)

    def remove(self, key: bytes) -> None:
        parent = self._parents.pop(key)
        del self._used[key]
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._parents:
                self._offer(parent)

    def oldest_leaf(self, protected: bytes) -> bytes | None:
        """Return the leaf to evict, or None. Never `protected`, the parent of the new page."""
        spared = None
        while self._heap:
            used, key = self._heap[0]
            if self._used.get(key) != used or key in self._num_children:
                heapq.heappop(self._heap)
            elif key == protected:
                spared = heapq.heappop(self._heap)
            else:
                break
        oldest = self._heap[0][1] if self._heap else None
        if spared is not None:
            heapq.heappush(self._heap, spared)
        return oldest

    def _offer(self, key: bytes) -> None:
        """Put a leaf up for eviction."""
        heapq.heappush(self._heap, (self._used[key], key))
        if len(self._heap) > 64 + 2 * len(self._parents):
            leaves = (key for key in self._parents if key not in self._num_children)
            self._heap = [(self._used[key], key) for key in leaves]
            heapq.heapify(self._heap)
