"""Lines on the terminal while a long scenario runs."""

from __future__ import annotations

import threading
import time

from harness.servers import Announce

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Count finished answers, and announce the count from time to time. done() may be called by any
    thread."""

    def __init__(self, label: str, announce: Announce) -> None:
        self._label = label
        self._announce = announce
        self._lock = threading.Lock()
        self._num_done = 0
        self._started = self._announced = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def done(self) -> None:
        with self._lock:
            self._num_done += 1
            if time.monotonic() - self._announced >= _SECONDS_BETWEEN_LINES:
                self._announced = time.monotonic()
                self._announce(f"{self._label}: {self._num_done} answers, {self.elapsed_s:.0f} s")
