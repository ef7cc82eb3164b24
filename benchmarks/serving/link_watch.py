"""Reports of a server about its link while requests run: after they end, nothing moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import requests

INTERVAL_S = 1.0


class LinkWatch:
    """Context manager that reads the kvspec section of /server_info every `interval_s`.

    busiest: the last section whose `link` has the most requests, None if there was none.
    num_missed: number of failed reads.
    """

    def __init__(
        self, ask: Callable[[], Mapping[str, Any]], interval_s: float = INTERVAL_S
    ) -> None:
        self.busiest: Mapping[str, Any] | None = None
        self.num_missed = 0
        self._most = 0
        self._ask, self._interval_s = ask, interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LinkWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            try:
                section = self._ask()
            except requests.RequestException:
                # The measurement itself reports a server that has died.
                self.num_missed += 1
                continue
            link = section.get("link")
            if link and link["num_requests"] >= self._most:
                self.busiest, self._most = section, link["num_requests"]
