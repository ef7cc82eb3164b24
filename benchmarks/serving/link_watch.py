"""What a server says of its link while requests run: once they leave, nothing moves any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import requests

INTERVAL_S = 1.0


class LinkWatch:
    """A context manager: while it is entered, asks for the kvspec section of /server_info every
    second. `busiest` is the last one of those whose `link` is of the most requests, None where
    there was none; `num_missed` counts answers that did not come."""

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
                # A server that died is told of by whoever measures.
                self.num_missed += 1
                continue
            link = section.get("link")
            if link and link["num_requests"] >= self._most:
                self.busiest, self._most = section, link["num_requests"]
