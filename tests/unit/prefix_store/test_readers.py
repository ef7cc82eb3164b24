"""Stores that another process writes, as readers see them."""

from __future__ import annotations

from sglang_kvspec.kv.prefix_store import open_reader
from sglang_kvspec.kv.prefix_store.slab import Slab


def test_a_page_written_while_a_reader_opens_is_no_leftover(
    make_store, small, tmp_path, monkeypatch
):
    """A residual that is read before its anchor must not count as one without an anchor."""
    store = make_store()
    small.write(store, [1, 1])
    right = Slab.load_index

    def then_write(slab):
        entries = right(slab)
        small.write(store, [2, 2])
        return entries

    monkeypatch.setattr(Slab, "load_index", then_write)
    reader = open_reader(tmp_path / "store", small.identity)
    assert small.found(reader, [1, 1]) == (1, 1)
    assert small.found(reader, [2, 2]) == (1, 0)
    assert reader.counters.unpaired == 0
    reader.close()
