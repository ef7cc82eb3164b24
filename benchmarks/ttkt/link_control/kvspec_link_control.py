"""Lets a benchmark change the emulated link of a prefill server while it runs: starting one for
each speed would take longer than all that is measured.

A server that has this folder on PYTHONPATH loads it as an SGLang plugin. The file named by
KVSPEC_LINK_FILE holds the GB/s that its `--kvspec-link-gbps` stands for from then on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def register() -> None:
    if "KVSPEC_LINK_FILE" not in os.environ:
        return
    from sglang_kvspec.transport.shaping import TokenBucket

    path = Path(os.environ["KVSPEC_LINK_FILE"])
    refill = TokenBucket._refill

    def controlled(bucket: Any, now_s: float) -> None:
        # At the old speed until now.
        refill(bucket, now_s)
        bucket.bytes_per_s = float(path.read_text(encoding="ascii")) * 1e9

    TokenBucket._refill = controlled  # type: ignore[method-assign]
