"""Comparison of two ends before they talk."""

from __future__ import annotations

from typing import Any

from sglang_kvspec.transport.frames import Identity

_WORDS = {
    "protocol": "transport protocol",
    "package": "versions of KV and packages",
    "codec": "--kvspec-codec",
    "target": "--kvspec-target",
    "page_size": "--page-size",
}


def mismatch(here: Identity, there: Identity) -> str | None:
    """Return one sentence on the first difference, as the sender tells a receiver; None if there
    is none."""
    for field, words in _WORDS.items():
        if (wrong := _differ(words, getattr(here, field), getattr(there, field))) is not None:
            return wrong
    # Sizes before the model: each rank has its own part of the model.
    if (wrong := _unfit_sizes(here, there)) is not None:
        return wrong
    if (wrong := _differ("tensor-parallel rank", here.rank, there.rank)) is not None:
        return wrong
    if here.tp_shape == there.tp_shape:
        return _differ("model", here.fingerprint, there.fingerprint)
    return _differ("model", here.whole, there.whole)


def _unfit_sizes(here: Identity, there: Identity) -> str | None:
    """Return why the ranks of two ends do not fit, or None. A receiver may have the KV heads of one
    or several ranks of the sender, or a share of one rank's."""
    (size, heads), (their_size, their_heads) = here.tp_shape, there.tp_shape
    told = (
        f"sender has {size} ({heads} KV heads per rank), "
        f"receiver {their_size} ({their_heads} KV heads per rank)"
    )
    if not (size and their_size) or max(size, their_size) % min(size, their_size):
        return f"--tp-size of one end must be a multiple of the other's: {told}"
    if size * heads != their_size * their_heads:
        return f"KV heads that several ranks hold cannot be sent to another --tp-size: {told}"
    index, count = there.part
    if not index < count == max(1, their_size // size):
        return f"a receiver cannot have part {index} of {count} of the sender's KV heads: {told}"
    return None


def _differ(words: str, ours: Any, theirs: Any) -> str | None:
    if ours == theirs:
        return None
    return f"{words} must be the same on both ends: sender has {ours}, receiver {theirs}"


def wrong_protocol(here: int, there: int) -> str:
    wrong = _differ(_WORDS["protocol"], here, there)
    assert wrong is not None, "the protocols must differ"
    return wrong
