"""Keys of prefix pages: a chain of hashes, and beside each key the tokens to check it by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

KEY_BYTES = 32
TOKEN_BYTES = 8


class PageLink(NamedTuple):
    """One full page of a prefix. position: number of pages before it. tokens: its token ids as
    little-endian int64, compared wherever a key is found, so that a collision of keys is a miss."""

    key: bytes
    parent: bytes
    position: int
    tokens: bytes


class StoredPage(NamedTuple):
    """A page as it was when it was looked up. stamp: checksum of its anchor record, so that an
    anchor and a residual that were not encoded together never pass for a pair."""

    key: bytes
    stamp: int


def chain_links(
    tokens: Sequence[int], page_size: int, namespace: bytes = b""
) -> Iterator[PageLink]:
    """Return the links of the full pages of `tokens`, in order; a partial last page has none.

    namespace: separates prefixes whose KV differs for equal tokens: a LoRA's name, a cache salt.
    """
    num_pages = len(tokens) // page_size
    ids = np.asarray(tokens[: num_pages * page_size], dtype="<i8").tobytes()
    return extend_chain(_digest(b"kvspec root", namespace), 0, ids, page_size)


def extend_chain(parent: bytes, position: int, tokens: bytes, page_size: int) -> Iterator[PageLink]:
    """Yield the links of the pages that `tokens`, ids as in PageLink, fill after `parent`. Before
    the first of them are `position` pages."""
    page_bytes = page_size * TOKEN_BYTES
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        own = tokens[start : start + page_bytes]
        key = _digest(b"kvspec page", parent + own)
        yield PageLink(key, parent, position, own)
        parent, position = key, position + 1


def _digest(purpose: bytes, content: bytes) -> bytes:
    # Wide enough that no two namespaces with one key can be found: no comparison would catch them.
    return hashlib.blake2b(content, digest_size=KEY_BYTES, person=purpose).digest()
