"""Disks that are full or broken, and damaged records."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys

import pytest

from sglang_kvspec.kv.prefix_store.write_health import MENDED_S

FILES = ("anchors.data", "anchors.index", "residuals.data", "residuals.index")


@pytest.mark.parametrize("at", FILES)
def test_a_full_disk_loses_new_pages_and_keeps_old_ones(make_store, small, files, at):
    store = make_store()
    small.write(store, [1, 1, 2, 2])
    files.failing, files.error, files.at = {"write"}, errno.ENOSPC, at
    small.write(store, [5, 5])
    small.write(store, [6, 6, 7, 7])
    assert store.counters.write_errors > 0
    assert small.found(store, [1, 1, 2, 2]) == (2, 2)
    assert small.found(store, [5, 5])[1] == 0
    files.failing = set()
    small.write(store, [5, 5, 6, 6])
    assert small.found(store, [5, 5, 6, 6]) == (2, 2)
    store._state.catalogue.check_integrity()
    assert not store.counters.damaged_anchors + store.counters.damaged_residuals


def test_a_full_disk_and_its_end_are_logged_once(make_store, small, files, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    now_s = [0.0]
    store = make_store(clock=lambda: now_s[0])
    small.write(store, [1, 1])
    assert not caplog.records
    files.error = errno.ENOSPC
    # Small writes between large ones may succeed on a full disk.
    for page, files.failing in ((2, {"write"}), (3, set()), (4, {"write"}), (5, {"write"})):
        small.write(store, [page, page])
        now_s[0] += 1.0
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert f"{tmp_path / 'store'}: No space left on device" in warning.getMessage()
    assert "costs speed and changes no output" in warning.getMessage()
    files.failing = set()
    for page in (6, 7, 8):
        small.write(store, [page, page])
        now_s[0] += MENDED_S
    _, mended = caplog.records
    assert mended.levelname == "INFO"
    assert f"store {tmp_path / 'store'} keeps new prefixes again" in mended.getMessage()
    files.failing = {"write"}
    small.write(store, [9, 9])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    """Use the real system call in a process of its own, since the limit holds for all its files."""
    script = f"""
import resource
from pathlib import Path
from sglang_kvspec.kv.prefix_store import StoreIdentity, StoreLimits, chain_links, open_store
identity = StoreIdentity("m", "0/1", "uniform4", "", "exact", "float32", 1, 1, 1, 16, 1000, 1000)
store = open_store(Path({str(tmp_path)!r}), identity, StoreLimits(1 << 20), threaded=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (4500, 4500))
tokens = list(range(10))
for link in chain_links(tokens, 1):
    store.put(link, link.key[:1] * 1000, link.key[1:2] * 1000)
store.write_due()
pages = store.lookup(tokens).pages
rows = [memoryview(bytearray(1000)) for _ in pages]
assert all(store.read_anchors(pages, rows))
assert all(bytes(row) == page.key[:1] * 1000 for row, page in zip(rows, pages))
print(len(pages), store.counters.write_errors > 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["4", "True"]
    (line,) = done.stderr.splitlines()
    assert "File too large. New prefixes are not kept" in line


def test_an_unreadable_block_is_a_miss_and_stays_where_it_is(make_store, small, files):
    store = make_store()
    small.write(store, [1, 1, 2, 2])
    files.failing, files.at = {"read"}, "anchors.data"
    assert small.found(store, [1, 1, 2, 2]) == (0, 2)
    assert store.counters.read_errors == 2
    files.failing = set()
    assert small.found(store, [1, 1, 2, 2]) == (2, 2)


@pytest.mark.parametrize("what", ["flipped", "cut off"])
@pytest.mark.parametrize("tier", ["anchors", "residuals"])
def test_a_damaged_record_is_a_miss_counted_once_and_removed(
    make_store, small, tmp_path, tier, what
):
    store = make_store()
    small.write(store, [1, 1, 2, 2])
    path = tmp_path / "store" / f"{tier}.data"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle + 3] ^= 1
    path.write_bytes(content if what == "flipped" else content[: middle + 3])
    expected = {"anchors": (1, 1), "residuals": (2, 1)}[tier]
    for _ in range(2):
        assert small.found(store, [1, 1, 2, 2]) == expected
        counters = store.counters
        assert (counters.damaged_anchors, counters.damaged_residuals) == (
            (1, 0) if tier == "anchors" else (0, 1)
        )
    store.close()
    again = make_store()
    assert small.found(again, [1, 1, 2, 2]) == expected
    assert not again.counters.damaged_anchors + again.counters.damaged_residuals
    small.write(again, [1, 1, 2, 2])
    assert small.found(again, [1, 1, 2, 2]) == (2, 2)


def test_a_lost_page_brings_its_descendants_back_when_it_returns(make_store, small, tmp_path):
    store = make_store()
    small.write(store, [1, 1, 2, 2, 3, 3])
    path = tmp_path / "store" / "anchors.data"
    path.write_bytes(b"\x55" + path.read_bytes()[1:])
    assert small.found(store, [1, 1, 2, 2, 3, 3]) == (2, 2)
    assert small.found(store, [1, 1, 2, 2, 3, 3]) == (0, 0)
    small.write(store, [1, 1])
    assert small.found(store, [1, 1, 2, 2, 3, 3]) == (3, 3)


def test_flush_tells_whether_the_disk_has_everything(make_store, small, files):
    store = make_store()
    small.write(store, [1, 1])
    assert store.flush(0)
    files.failing = {"sync"}
    assert not store.flush(0)
    files.failing = set()
    (link,) = small.links([2, 2])
    store.put(link, small.anchor(link))
    assert not store.flush(0)


def test_a_closed_store_takes_and_finds_nothing_and_does_not_raise(make_store, small):
    store = make_store()
    small.write(store, [1, 1])
    pages = store.lookup([1, 1]).pages
    store.close()
    store.close()
    (link,) = small.links([2, 2])
    assert not store.put(link, small.anchor(link))
    assert small.read(store, pages) == ([None], [None])
