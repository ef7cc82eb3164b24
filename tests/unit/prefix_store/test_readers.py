"""Stores that another process writes, as seen by those that read them."""

from __future__ import annotations

import pytest

from sglang_kvspec.pools.prefix_store import open_reader


@pytest.mark.parametrize("at", ["anchors.index", "residuals.index"])
def test_a_reader_that_cannot_refresh_catches_up_later(make_store, small, files, tmp_path, at):
    store = make_store(2)
    small.write(store, [1, 1])
    reader = open_reader(tmp_path / "store", small.identity, open_file=files)
    small.write(store, [2, 2])
    small.write(store, [3, 3])
    files.failing, files.at = {"read"}, at
    reader.refresh()
    assert reader.counters.read_errors == 1
    files.failing = set()
    assert [small.found(reader, [n, n]) for n in (1, 2, 3)] == [(0, 0)] * 3
    reader.refresh()
    assert [small.found(reader, [n, n]) for n in (1, 2, 3)] == [(0, 0), (1, 1), (1, 1)]
    reader.close()


def test_a_reader_finds_again_what_it_took_for_lost(make_store, small, tmp_path):
    """The writer repairs a record that the reader met damaged: the entry is the same as before."""
    store = make_store()
    small.write(store, [1, 1])
    path = tmp_path / "store" / "anchors.data"
    content = path.read_bytes()
    reader = open_reader(tmp_path / "store", small.identity)
    path.write_bytes(b"\x55" + content[1:])
    assert small.found(reader, [1, 1]) == (0, 0)
    reader.refresh()
    assert small.found(reader, [1, 1]) == (0, 0)
    assert reader.counters.damaged_anchors == 2
    path.write_bytes(content)
    reader.refresh()
    assert small.found(reader, [1, 1]) == (1, 1)
    reader.close()


def test_a_page_written_during_a_refresh_is_seen_by_the_next(make_store, small, tmp_path):
    """Whole: a residual that is met before its anchor must not be taken for a leftover."""
    store = make_store()
    small.write(store, [1, 1])
    reader = open_reader(tmp_path / "store", small.identity)
    for slab in reader._state.slabs:
        right = slab.changed_slots

        def then_write(doubtful, right=right):
            slots = right(doubtful)
            small.write(store, [2, 2])
            return slots

        slab.changed_slots = then_write
    reader.refresh()
    assert small.found(reader, [1, 1]) == (1, 1)
    reader.refresh()
    assert small.found(reader, [2, 2]) == (1, 1)
    reader.close()
