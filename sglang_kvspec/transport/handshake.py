"""Whether two ends may talk."""

from __future__ import annotations

from typing import Any

from sglang_kvspec.transport.frames import Identity

_WORDS = {
    "protocol": "transport protocol",
    "package": "sglang-kvspec version",
    "codec": "--kvspec-codec",
    "target": "--kvspec-target",
    "page_size": "--page-size",
    # Before the model: each rank has its own part of that.
    "tp_shape": "--tp-size",
    "fingerprint": "model",
}


def mismatch(here: Identity, there: Identity) -> str | None:
    """One sentence on the first thing that differs, as the sender tells a receiver; None if
    nothing does."""
    for field, words in _WORDS.items():
        ours, theirs = getattr(here, field), getattr(there, field)
        if ours != theirs:
            ours, theirs = _told(field, ours), _told(field, theirs)
            return f"{words} must be the same on both ends: sender has {ours}, receiver {theirs}"
    return None


def _told(field: str, value: Any) -> Any:
    if field != "tp_shape":
        return value
    size, heads = value
    return f"{size} ({heads} KV heads a rank)"


def wrong_protocol(here: int, there: int) -> str:
    return (
        f"{_WORDS['protocol']} must be the same on both ends: sender has {here}, receiver {there}"
    )
