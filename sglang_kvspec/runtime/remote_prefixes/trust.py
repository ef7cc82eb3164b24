"""Whether asking is worth a request's wait. Times are given, never taken."""

from __future__ import annotations

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


class Trust:
    """A store that lets a request wait in vain is not asked for a while, twice as long each time;
    one page that comes makes up for it."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._paused_until_s = float("-inf")

    def allows(self, now_s: float) -> bool:
        return now_s >= self._paused_until_s

    def disappoint(self, now_s: float) -> None:
        if now_s < self._paused_until_s:
            # It was asked before.
            return
        self._paused_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def please(self) -> None:
        self._pause_s, self._paused_until_s = FIRST_PAUSE_S, float("-inf")
