"""Scheduler.on_idle: a server that only waits for its links does not spin.

SGLang 0.5.17 polls transfers as fast as it can while no batch runs, which takes the core from the
thread that moves the bytes.
"""

from __future__ import annotations

from typing import Any


def hook(result: None, self: Any) -> None:
    from sglang_kvspec.adapters import prefix_queue
    from sglang_kvspec.adapters.transfer import decoding

    # One wait: a prefill server may have both, and what wakes one does not wake the other.
    if not prefix_queue.wait_when_idle(self):
        decoding.wait_when_idle(self)
