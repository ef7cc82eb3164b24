"""Spreads verifications over iterations (VeriCache section 4.2; its section 5 places them)."""

from __future__ import annotations

from collections import Counter


class StaggerRing:
    """Counts the verifications due in each coming iteration.

    A reservation of a request that finishes early stays until its iteration has passed: it costs a
    slightly emptier iteration, never a wrong one.
    """

    def __init__(self) -> None:
        self._due: Counter[int] = Counter()

    def place(self, now: int, best: int, max_len: int, num_running: int) -> int:
        """Reserve an iteration near now + best and return the draft length that leads to it.

        Tries best, best - 1, best + 1, ... within 1..max_len and takes the first iteration with
        room; an iteration has room for its fair share of the running requests' verifications.
        """
        for past in [iteration for iteration in self._due if iteration < now]:
            del self._due[past]
        share = -(-num_running // (best + 1))
        lengths = sorted(range(1, max_len + 1), key=lambda n: (abs(n - best), n))
        chosen = next(
            (n for n in lengths if self._due[now + n] < share),
            min(lengths, key=lambda n: (self._due[now + n], abs(n - best))),
        )
        self._due[now + chosen] += 1
        return chosen
