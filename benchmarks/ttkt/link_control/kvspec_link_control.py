"""Control of a prefill server's emulated link while the server runs.

Starting a server for each speed would take longer than the measurement. A server that has this
folder on PYTHONPATH loads it as an SGLang plug-in. The file named by KVSPEC_LINK_FILE holds the
GB/s that replace the server's `--kvspec-link-gbps`.
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
        # Refill at the old speed up to this moment.
        refill(bucket, now_s)
        bucket.bytes_per_s = float(path.read_text(encoding="ascii")) * 1e9

    TokenBucket._refill = controlled  # type: ignore[method-assign]
