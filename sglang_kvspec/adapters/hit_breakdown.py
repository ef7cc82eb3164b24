"""What SGLang does not tell apart of a prompt's hits: it has three tiers."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sglang_kvspec.kv.page_sources import Loaded


class LoadedTokens(NamedTuple):
    """Tokens of a prompt that were loaded. remote: from a prefix server, which SGLang counts as
    storage's. kept_host, kept_disk: of those from host memory and from disk, whose anchors were in
    GPU memory still."""

    remote: int = 0
    kept_host: int = 0
    kept_disk: int = 0


_tokens: WeakKeyDictionary[Any, LoadedTokens] = WeakKeyDictionary()
# Tokens drafted while residuals of hits were on their way.
_drafts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def note(req: Any, loaded: Loaded, page_size: int) -> None:
    """Of a request whose prefix was loaded. What comes of it after a retraction was cached by it
    or by others since, and SGLang counts it no more."""
    if not req.retracted_stain:
        pages = (loaded.num_from_remote, loaded.kept_host, loaded.kept_disk)
        _tokens[req] = LoadedTokens(*(num_pages * page_size for num_pages in pages))


def note_drafts(req: Any, count: int) -> None:
    """A request has drafted so many tokens while residuals of its hits were on their way."""
    _drafts[req] = drafts_of(req) + count


def drafts_of(req: Any) -> int:
    return _drafts.get(req, 0)


def tokens_of(req: Any) -> LoadedTokens:
    """Of those that SGLang counts."""
    found = _tokens.get(req, LoadedTokens())
    in_storage = int(req.cached_tokens_storage)
    remote = min(found.remote, in_storage)
    kept_host = min(found.kept_host, int(req.cached_tokens_host))
    return LoadedTokens(remote, kept_host, min(found.kept_disk, in_storage - remote))
