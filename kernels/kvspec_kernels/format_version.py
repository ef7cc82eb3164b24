"""Version of formats.py's byte layouts, for modules that compare versions without torch."""

from __future__ import annotations

# Add one whenever the bytes of a record change meaning: stores and prefix servers compare it.
FORMAT_VERSION = 2
