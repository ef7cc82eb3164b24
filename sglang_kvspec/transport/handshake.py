"""Whether two ends may talk."""

from __future__ import annotations

from sglang_kvspec.transport.frames import Identity

_WORDS = {
    "protocol": "transport protocol",
    "package": "sglang-kvspec version",
    "codec": "--kvspec-codec",
    "target": "--kvspec-target",
    "page_size": "--page-size",
    "fingerprint": "model",
    "tp_shape": "tensor-parallel ranks and KV heads of a rank",
}


def mismatch(here: Identity, there: Identity) -> str | None:
    """One sentence on the first thing that differs, as the sender tells a receiver; None if
    nothing does."""
    for field, words in _WORDS.items():
        ours, theirs = getattr(here, field), getattr(there, field)
        if ours != theirs:
            return f"{words} must be the same on both ends: sender has {ours}, receiver {theirs}"
    return None


def wrong_protocol(here: int, there: int) -> str:
    return (
        f"{_WORDS['protocol']} must be the same on both ends: sender has {here}, receiver {there}"
    )
