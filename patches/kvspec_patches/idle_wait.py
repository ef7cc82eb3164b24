"""Scheduler.on_idle: a server that only waits for its links does not spin.

SGLang 0.5.17 polls transfers as fast as it can while no batch runs. That takes the core from the
thread that moves the bytes.
"""

from __future__ import annotations

from typing import Any


def hook(result: None, self: Any) -> None:
    from sglang_kvspec.adapters import prefix_queue
    from sglang_kvspec.adapters.transfer import decoding

    # Wait for one of the two only: news for one of them does not end a wait for the other.
    if not prefix_queue.wait_when_idle(self):
        decoding.wait_when_idle(self)
