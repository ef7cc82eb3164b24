"""Disks that are full, broken or read-only, and folders that hold something else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from sglang_kvspec.core.errors import PrefixStoreError
from sglang_kvspec.pools.prefix_store import open_reader, open_store
from sglang_kvspec.pools.prefix_store.disk_file import DiskFile

FILES = ("anchors.data", "anchors.index", "residuals.data", "residuals.index")


def put_all(store, small, tokens):
    for link in small.links(tokens):
        store.put(link, small.anchor(link), small.residual(link))
    store.write_due()


def found(store, small, tokens):
    """How many anchors and residuals of `tokens` can be read, all of them right."""
    pages = store.lookup(tokens).pages
    links = small.links(tokens)
    anchors, residuals = small.read(store, pages)
    for link, anchor, residual in zip(links, anchors, residuals, strict=False):
        assert anchor in (None, small.anchor(link))
        assert residual in (None, small.residual(link))
    return sum(a is not None for a in anchors), sum(r is not None for r in residuals)


@pytest.mark.parametrize("at", FILES)
def test_a_full_disk_loses_new_pages_and_keeps_old_ones(make_store, small, files, at):
    store = make_store()
    put_all(store, small, [1, 1, 2, 2])
    files.failing, files.error, files.at = {"write"}, errno.ENOSPC, at
    put_all(store, small, [5, 5])
    put_all(store, small, [6, 6, 7, 7])
    assert store.counters.write_errors > 0
    assert found(store, small, [1, 1, 2, 2]) == (2, 2)
    assert found(store, small, [5, 5])[1] == 0
    files.failing = set()
    put_all(store, small, [5, 5, 6, 6])
    assert found(store, small, [5, 5, 6, 6]) == (2, 2)
    store._state.catalogue.check_integrity()
    assert not store.counters.damaged_anchors + store.counters.damaged_residuals


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    """The real system call, in a process of its own: the limit holds for all its files."""
    script = f"""
import resource
from pathlib import Path
from sglang_kvspec.pools.prefix_store import StoreIdentity, StoreLimits, chain_links, open_store
identity = StoreIdentity("m", "0/1", "log4", "", "exact", "float32", 1, 1, 1, 16, 1000, 1000)
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
    assert (done.stdout.split(), done.stderr) == (["4", "True"], "")


def test_an_unreadable_block_is_a_miss_and_stays_where_it_is(make_store, small, files):
    store = make_store()
    put_all(store, small, [1, 1, 2, 2])
    files.failing, files.at = {"read"}, "anchors.data"
    assert found(store, small, [1, 1, 2, 2]) == (0, 2)
    assert store.counters.read_errors == 2
    files.failing = set()
    assert found(store, small, [1, 1, 2, 2]) == (2, 2)


@pytest.mark.parametrize("at", ["anchors.index", "residuals.index"])
def test_a_reader_that_cannot_refresh_catches_up_later(make_store, small, files, tmp_path, at):
    store = make_store(2)
    put_all(store, small, [1, 1])
    reader = open_reader(tmp_path / "store", small.identity, open_file=files)
    put_all(store, small, [2, 2])
    put_all(store, small, [3, 3])
    files.failing, files.at = {"read"}, at
    reader.refresh()
    assert reader.counters.read_errors == 1
    files.failing = set()
    assert [found(reader, small, [n, n]) for n in (1, 2, 3)] == [(0, 0)] * 3
    reader.refresh()
    assert [found(reader, small, [n, n]) for n in (1, 2, 3)] == [(0, 0), (1, 1), (1, 1)]
    reader.close()


def test_a_reader_finds_again_what_it_took_for_lost(make_store, small, tmp_path):
    """The writer repairs a record that the reader met damaged: the entry is the same as before."""
    store = make_store()
    put_all(store, small, [1, 1])
    path = tmp_path / "store" / "anchors.data"
    content = path.read_bytes()
    reader = open_reader(tmp_path / "store", small.identity)
    path.write_bytes(b"\x55" + content[1:])
    assert found(reader, small, [1, 1]) == (0, 0)
    reader.refresh()
    assert found(reader, small, [1, 1]) == (0, 0)
    assert reader.counters.damaged_anchors == 2
    path.write_bytes(content)
    reader.refresh()
    assert found(reader, small, [1, 1]) == (1, 1)
    reader.close()


@pytest.mark.parametrize("what", ["flipped", "cut off"])
@pytest.mark.parametrize("tier", ["anchors", "residuals"])
def test_a_damaged_record_is_a_miss_counted_once_and_removed(
    make_store, small, tmp_path, tier, what
):
    store = make_store()
    put_all(store, small, [1, 1, 2, 2])
    path = tmp_path / "store" / f"{tier}.data"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle + 3] ^= 1
    path.write_bytes(content if what == "flipped" else content[: middle + 3])
    expected = {"anchors": (1, 1), "residuals": (2, 1)}[tier]
    for _ in range(2):
        assert found(store, small, [1, 1, 2, 2]) == expected
        counters = store.counters
        assert (counters.damaged_anchors, counters.damaged_residuals) == (
            (1, 0) if tier == "anchors" else (0, 1)
        )
    store.close()
    again = make_store()
    assert found(again, small, [1, 1, 2, 2]) == expected
    assert not again.counters.damaged_anchors + again.counters.damaged_residuals
    put_all(again, small, [1, 1, 2, 2])
    assert found(again, small, [1, 1, 2, 2]) == (2, 2)


def test_a_lost_page_brings_its_descendants_back_when_it_returns(make_store, small, tmp_path):
    store = make_store()
    put_all(store, small, [1, 1, 2, 2, 3, 3])
    path = tmp_path / "store" / "anchors.data"
    path.write_bytes(b"\x55" + path.read_bytes()[1:])
    assert found(store, small, [1, 1, 2, 2, 3, 3]) == (2, 2)
    assert found(store, small, [1, 1, 2, 2, 3, 3]) == (0, 0)
    put_all(store, small, [1, 1])
    assert found(store, small, [1, 1, 2, 2, 3, 3]) == (3, 3)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"\0" * 500, b"not an index at all" * 40])
def test_a_writer_starts_anew_on_an_unreadable_index(make_store, small, tmp_path, name, content):
    store = make_store()
    put_all(store, small, [1, 1, 2, 2])
    store.close()
    (tmp_path / "store" / name).write_bytes(content)
    again = make_store()
    assert found(again, small, [1, 1, 2, 2])[0] == (0 if "anchors" in name else 2)
    put_all(again, small, [1, 1, 2, 2])
    put_all(again, small, [1, 1, 2, 2])
    assert found(again, small, [1, 1, 2, 2]) == (2, 2)


@pytest.mark.parametrize("name", ["anchors.index", "residuals.index"])
def test_a_reader_refuses_an_unreadable_index(make_store, small, tmp_path, name):
    make_store().close()
    (tmp_path / "store" / name).write_bytes(b"not an index at all")
    with pytest.raises(PrefixStoreError, match=rf"{name} is damaged or of another version"):
        open_reader(tmp_path / "store", small.identity)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "written for another model: 'small', here it is 'other'"),
        ({"shard": "1/2"}, "another shard"),
        ({"codec": "uniform4"}, "another codec"),
        ({"settings": '{"top": 110}'}, "another settings"),
        ({"target": "exact", "residual_page_bytes": 99}, "another target"),
        ({"dtype": "bfloat16"}, "another dtype"),
        ({"page_size": 4}, "another page_size: 2, here it is 4"),
        ({"num_layers": 2, "anchor_page_bytes": 48}, "another num_layers"),
        ({"num_kv_heads": 2}, "another num_kv_heads"),
        ({"head_dim": 32}, "another head_dim"),
        ({"record_version": 1}, "another record_version"),
        ({"store_version": 2}, "another store_version"),
    ],
)
def test_another_identity_is_refused(make_store, small, tmp_path, change, reason):
    store = make_store()
    put_all(store, small, [1, 1])
    store.close()
    other = replace(small.identity, **change)
    for call in (
        lambda: open_reader(tmp_path / "store", other),
        lambda: open_store(tmp_path / "store", other, small.limits(100)),
    ):
        with pytest.raises(PrefixStoreError, match=reason) as caught:
            call()
        assert str(caught.value).endswith("choose another folder")
    assert other.folder_name != small.identity.folder_name
    assert found(make_store(), small, [1, 1]) == (1, 1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_an_unreadable_identity_is_refused_and_kept(make_store, small, tmp_path, content):
    make_store().close()
    path = tmp_path / "store" / "identity.json"
    path.write_bytes(content)
    with pytest.raises(PrefixStoreError, match=r"identity"):
        make_store()
    assert path.read_bytes() == content


def test_files_of_others_are_left_alone(make_store, small, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    store = make_store()
    put_all(store, small, [1, 1])
    store.close()
    assert (folder / "notes.txt").read_text() == "mine"
    assert found(make_store(), small, [1, 1]) == (1, 1)


def test_a_file_of_our_name_that_is_not_ours_is_not_overwritten(make_store, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "anchors.data").write_text("a novel")
    with pytest.raises(PrefixStoreError, match=r"holds anchors.data but no identity"):
        make_store()
    assert (folder / "anchors.data").read_text() == "a novel"


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_something_that_is_no_file_is_one_clear_error(make_store, small, tmp_path, kind):
    make_store().close()
    path = tmp_path / "store" / "residuals.data"
    path.unlink()
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(PrefixStoreError, match=r"cannot write it: .*residuals.data"):
        make_store()
    with pytest.raises(PrefixStoreError, match=r"cannot read it: .*residuals.data"):
        open_reader(tmp_path / "store", small.identity)


def test_a_folder_that_is_a_file_or_not_there(make_store, small, tmp_path):
    with pytest.raises(PrefixStoreError, match="there is no prefix store in"):
        open_reader(tmp_path / "store", small.identity)
    (tmp_path / "store").write_text("")
    with pytest.raises(PrefixStoreError, match="cannot write it"):
        make_store()


def test_a_read_only_folder_can_be_read_and_not_written(make_store, small, tmp_path):
    store = make_store()
    put_all(store, small, [1, 1])
    store.close()

    def read_only_disk(path, writable):
        if writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return DiskFile(path, writable)

    with pytest.raises(PrefixStoreError, match=r"cannot write it: .*Read-only file system"):
        make_store(open_file=read_only_disk)
    reader = open_reader(tmp_path / "store", small.identity, open_file=read_only_disk)
    assert found(reader, small, [1, 1]) == (1, 1)
    reader.close()


def test_an_error_while_opening_lets_the_lock_go(make_store, files):
    files.failing = {"open"}
    with pytest.raises(PrefixStoreError):
        make_store()
    files.failing = set()
    make_store()


def test_flush_tells_whether_the_disk_has_everything(make_store, small, files):
    store = make_store()
    put_all(store, small, [1, 1])
    assert store.flush(0)
    files.failing = {"sync"}
    assert not store.flush(0)
    files.failing = set()
    (link,) = small.links([2, 2])
    store.put(link, small.anchor(link))
    assert not store.flush(0)


def test_a_closed_store_takes_and_finds_nothing_and_does_not_raise(make_store, small):
    store = make_store()
    put_all(store, small, [1, 1])
    pages = store.lookup([1, 1]).pages
    store.close()
    store.close()
    (link,) = small.links([2, 2])
    assert not store.put(link, small.anchor(link))
    assert small.read(store, pages) == ([None], [None])
    store.refresh()
