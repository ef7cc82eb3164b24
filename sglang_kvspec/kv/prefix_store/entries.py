"""Byte layout of a store's index files. An entry describes one slot of the data file.

    index file                         entry of slot i, at HEADER_BYTES + i * entry bytes
    +-----------------+-----------+    +----------+------------------------------------+--------+
    | magic           | 8 bytes   |    | check    | xxh3 of the rest, seeded with slot | uint64 |
    | store version   | uint32    |    |          | and identity; 0 and all else 0:    |        |
    | entry bytes     | uint32    |    |          | the slot is free                   |        |
    | record bytes    | uint64    |    | sequence | order of writing, store-wide       | uint64 |
    | identity digest | 32 bytes  |    | checksum | xxh3 of the record                 | uint64 |
    | check           | uint64    |    | key      | key of the page                    | 32     |
    | entries         |           |    | meta     | by tier, see below                 |        |
    +-----------------+-----------+    +----------+------------------------------------+--------+

Meta of an anchor: number of pages before it (uint64), parent's key (32), tokens (int64 each).
Meta of a residual: checksum of the anchor that it was encoded with (uint64). All little-endian.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from sglang_kvspec.kv.prefix_store.identity import STORE_VERSION, StoreIdentity
from sglang_kvspec.kv.prefix_store.page_keys import KEY_BYTES, TOKEN_BYTES, PageLink

MAGIC = b"kvspecPS"
_HEADER = struct.Struct("<8sIIQ32s")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECK.size
_ENTRY = struct.Struct(f"<QQ{KEY_BYTES}s")
# Bytes of an entry that hold its sequence.
SEQUENCE = slice(_CHECK.size, _CHECK.size + 8)
_ANCHOR = struct.Struct(f"<Q{KEY_BYTES}s")
_RESIDUAL = struct.Struct("<Q")


class Entry(NamedTuple):
    sequence: int
    checksum: int
    key: bytes
    meta: bytes


class EntryFormat:
    """Format of the entries of one tier of one store. Entries of other stores fail its check."""

    def __init__(self, identity: StoreIdentity, meta_bytes: int, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self._meta_bytes = meta_bytes
        self.nbytes = _CHECK.size + _ENTRY.size + meta_bytes
        self._seed = int.from_bytes(identity.digest[:8], "little")
        head = _HEADER.pack(MAGIC, STORE_VERSION, self.nbytes, record_bytes, identity.digest)
        self.header = head + _CHECK.pack(xxh3_64_intdigest(head))
        self.free = bytes(self.nbytes)

    @classmethod
    def of_anchors(cls, identity: StoreIdentity) -> EntryFormat:
        meta_bytes = _ANCHOR.size + identity.page_size * TOKEN_BYTES
        return cls(identity, meta_bytes, identity.anchor_page_bytes)

    @classmethod
    def of_residuals(cls, identity: StoreIdentity) -> EntryFormat:
        return cls(identity, _RESIDUAL.size, identity.residual_page_bytes)

    def offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self.nbytes

    def pack(self, slot: int, entry: Entry) -> bytes:
        assert len(entry.meta) == self._meta_bytes, (len(entry.meta), self._meta_bytes)
        body = _ENTRY.pack(entry.sequence, entry.checksum, entry.key) + entry.meta
        return _CHECK.pack(self._check(slot, body)) + body

    def unpack(self, slot: int, raw: bytes) -> Entry | None:
        """Return the slot's entry, or None if it is free, torn or not of this store."""
        (check,) = _CHECK.unpack_from(raw)
        body = raw[_CHECK.size :]
        if raw == self.free or check != self._check(slot, body):
            return None
        sequence, checksum, key = _ENTRY.unpack_from(body)
        return Entry(sequence, checksum, key, body[_ENTRY.size :])

    def _check(self, slot: int, body: bytes) -> int:
        return xxh3_64_intdigest(body, seed=self._seed ^ slot)


def pack_link(link: PageLink) -> bytes:
    return _ANCHOR.pack(link.position, link.parent) + link.tokens


def unpack_link(entry: Entry) -> PageLink:
    position, parent = _ANCHOR.unpack_from(entry.meta)
    return PageLink(entry.key, parent, position, entry.meta[_ANCHOR.size :])


def pack_stamp(stamp: int) -> bytes:
    return _RESIDUAL.pack(stamp)


def unpack_stamp(entry: Entry) -> int:
    (stamp,) = _RESIDUAL.unpack(entry.meta)
    return int(stamp)
