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
}


def mismatch(here: Identity, there: Identity) -> str | None:
    """One sentence on the first thing that differs, as the sender tells a receiver; None if
    nothing does."""
    for field, words in _WORDS.items():
        if (wrong := _differ(words, getattr(here, field), getattr(there, field))) is not None:
            return wrong
    # Before the model: each rank has its own part of that.
    if (wrong := _unfit_sizes(here, there)) is not None:
        return wrong
    if (wrong := _differ("tensor-parallel rank", here.rank, there.rank)) is not None:
        return wrong
    if here.tp_shape == there.tp_shape:
        return _differ("model", here.fingerprint, there.fingerprint)
    return _differ("model", here.whole, there.whole)


def _unfit_sizes(here: Identity, there: Identity) -> str | None:
    """A receiver takes its KV heads from as many ranks of the sender, each with all of its own."""
    (size, heads), (their_size, their_heads) = here.tp_shape, there.tp_shape
    if size * heads == their_size * their_heads and their_size and size % their_size == 0:
        return None
    told = (
        f"sender has {size} ({heads} KV heads a rank), "
        f"receiver {their_size} ({their_heads} KV heads a rank)"
    )
    if their_size and size % their_size == 0:
        return f"ranks with --tp-size must have the same KV heads between them: {told}"
    return f"--tp-size of the sender must be a multiple of the receiver's: {told}"


def _differ(words: str, ours: Any, theirs: Any) -> str | None:
    if ours == theirs:
        return None
    return f"{words} must be the same on both ends: sender has {ours}, receiver {theirs}"


def wrong_protocol(here: int, there: int) -> str:
    wrong = _differ(_WORDS["protocol"], here, there)
    assert wrong is not None, "it was refused"
    return wrong
