"""Hits of a prompt by source, finer than the three tiers that SGLang counts."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sglang_kvspec.kv.page_sources import Loaded


class LoadedTokens(NamedTuple):
    """Tokens of a prompt that were loaded. remote: from a prefix server, which SGLang counts as
    storage. kept_host, kept_disk: from host memory and from disk, with anchors that were still in
    GPU memory."""

    remote: int = 0
    kept_host: int = 0
    kept_disk: int = 0


_tokens: WeakKeyDictionary[Any, LoadedTokens] = WeakKeyDictionary()
# Tokens drafted while residuals of hits were on their way.
_drafts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def note(req: Any, loaded: Loaded, page_size: int) -> None:
    """Note where a request's prefix was loaded from. Does nothing after a retraction: this
    request or others may have cached the prefix since, and SGLang does not count such hits."""
    if not req.retracted_stain:
        pages = (loaded.num_from_remote, loaded.kept_host, loaded.kept_disk)
        _tokens[req] = LoadedTokens(*(num_pages * page_size for num_pages in pages))


def note_drafts(req: Any, count: int) -> None:
    """Count drafts that a request made while residuals of its hits were on their way."""
    _drafts[req] = drafts_of(req) + count


def drafts_of(req: Any) -> int:
    return _drafts.get(req, 0)


def tokens_of(req: Any) -> LoadedTokens:
    """Return a request's loaded tokens by source, at most as many as SGLang counts."""
    found = _tokens.get(req, LoadedTokens())
    in_storage = int(req.cached_tokens_storage)
    remote = min(found.remote, in_storage)
    kept_host = min(found.kept_host, int(req.cached_tokens_host))
    return LoadedTokens(remote, kept_host, min(found.kept_disk, in_storage - remote))
