"""Circuit breaker of a prefix server, with exponential back-off. Callers pass the time."""

from __future__ import annotations

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


class CircuitBreaker:
    """Circuit breaker. A request that waited in vain opens it for a pause, which doubles each time,
    from FIRST_PAUSE_S to LONGEST_PAUSE_S. One page that arrives closes it."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._paused_until_s = float("-inf")

    def allows(self, now_s: float) -> bool:
        return now_s >= self._paused_until_s

    def record_failure(self, now_s: float) -> None:
        if now_s < self._paused_until_s:
            # The lookup was begun before the pause.
            return
        self._paused_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def record_success(self) -> None:
        self._pause_s, self._paused_until_s = FIRST_PAUSE_S, float("-inf")
