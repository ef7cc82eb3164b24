"""Entries of index files: undamaged entries are read back, and all other bytes are no entry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.kv.prefix_store.entries import (
    Entry,
    EntryFormat,
    pack_link,
    pack_stamp,
    unpack_link,
    unpack_stamp,
)


@pytest.fixture(scope="module")
def entry(small):
    (_, link) = small.links([1, 2, 3, 4])
    return Entry(7, 2**64 - 1, link.key, pack_link(link)), link


def test_an_anchors_entry_gives_back_its_link(small, entry):
    layout = EntryFormat.of_anchors(small.identity)
    packed = layout.pack(3, entry[0])
    assert len(packed) == layout.nbytes
    assert layout.unpack(3, packed) == entry[0]
    assert unpack_link(layout.unpack(3, packed)) == entry[1]


@given(stamp=st.integers(0, 2**64 - 1), sequence=st.integers(0, 2**64 - 1))
def test_a_residuals_entry_gives_back_its_stamp(small, stamp, sequence):
    layout = EntryFormat.of_residuals(small.identity)
    found = layout.unpack(0, layout.pack(0, Entry(sequence, 5, bytes(32), pack_stamp(stamp))))
    assert (found.sequence, unpack_stamp(found)) == (sequence, stamp)


def test_no_damaged_bit_is_overlooked(small, entry):
    layout = EntryFormat.of_anchors(small.identity)
    packed = layout.pack(3, entry[0])
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert layout.unpack(3, bytes(damaged)) is None, bit


def test_no_torn_entry_passes(small, entry):
    layout = EntryFormat.of_anchors(small.identity)
    packed = layout.pack(3, entry[0])
    old = layout.pack(3, entry[0]._replace(sequence=6, checksum=1, key=bytes(32)))
    for before in (layout.free, old):
        torn = [packed[:cut] + before[cut:] for cut in range(len(packed))]
        assert [layout.unpack(3, raw) for raw in torn if raw not in (packed, before)] == [
            None for raw in torn if raw not in (packed, before)
        ]


def test_free_misplaced_and_foreign_entries_are_none(small, entry):
    layout = EntryFormat.of_anchors(small.identity)
    other = EntryFormat.of_anchors(replace(small.identity, model="another"))
    assert layout.unpack(0, layout.free) is None
    assert layout.unpack(4, layout.pack(3, entry[0])) is None
    assert layout.unpack(3, other.pack(3, entry[0])) is None
    assert layout.header != other.header
    assert layout.header != EntryFormat.of_residuals(small.identity).header
