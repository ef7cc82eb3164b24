"""The environment variable that switches KVSpec on in the processes that a server spawns."""

from __future__ import annotations

import os

ENVIRONMENT_NAME = "SGLANG_KVSPEC"


def is_on() -> bool:
    """Return whether this process serves KVSpec."""
    return ENVIRONMENT_NAME in os.environ
