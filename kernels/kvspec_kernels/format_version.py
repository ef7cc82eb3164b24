"""The version of formats.py's byte layouts, for those who compare versions without torch."""

from __future__ import annotations

# Raised by one whenever the bytes of a record change meaning; stores and their servers compare it.
FORMAT_VERSION = 2
