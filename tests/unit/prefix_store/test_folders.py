"""Store folders that hold something else, belong to others or cannot be written."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

from sglang_kvspec.core.errors import PrefixStoreError
from sglang_kvspec.kv.prefix_store import open_reader, open_store
from sglang_kvspec.kv.prefix_store.disk_file import DiskFile

FILES = ("anchors.data", "anchors.index", "residuals.data", "residuals.index")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"\0" * 500, b"not an index at all" * 40])
def test_a_writer_starts_anew_on_an_unreadable_index(make_store, small, tmp_path, name, content):
    store = make_store()
    small.write(store, [1, 1, 2, 2])
    store.close()
    (tmp_path / "store" / name).write_bytes(content)
    again = make_store()
    assert small.found(again, [1, 1, 2, 2])[0] == (0 if "anchors" in name else 2)
    small.write(again, [1, 1, 2, 2])
    small.write(again, [1, 1, 2, 2])
    assert small.found(again, [1, 1, 2, 2]) == (2, 2)


@pytest.mark.parametrize("name", ["anchors.index", "residuals.index"])
def test_a_reader_refuses_an_unreadable_index(make_store, small, tmp_path, name):
    make_store().close()
    (tmp_path / "store" / name).write_bytes(b"not an index at all")
    with pytest.raises(PrefixStoreError, match=rf"{name} is damaged or of another version"):
        open_reader(tmp_path / "store", small.identity)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "the store has model 'small', this server 'other'"),
        ({"shard": "1/2"}, "the store has shard "),
        ({"codec": "log4"}, "the store has codec "),
        ({"settings": '{"top": 110}'}, "the store has settings "),
        ({"target": "exact", "residual_page_bytes": 99}, "the store has target "),
        ({"dtype": "bfloat16"}, "the store has dtype "),
        ({"page_size": 4}, "the store has page_size 2, this server 4"),
        ({"num_layers": 2, "anchor_page_bytes": 48}, "the store has num_layers "),
        ({"num_kv_heads": 2}, "the store has num_kv_heads "),
        ({"head_dim": 32}, "the store has head_dim "),
        ({"record_version": 1}, "the store has record_version "),
        ({"store_version": 1}, "the store has store_version "),
        ({"residual": "packed_1"}, "the store has residual 'raw', this server 'packed_1'"),
    ],
)
def test_another_identity_is_refused(make_store, small, tmp_path, change, reason):
    store = make_store()
    small.write(store, [1, 1])
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
    assert small.found(make_store(), [1, 1]) == (1, 1)


def test_ranks_have_folders_of_their_own(small):
    alone, *ranks = (replace(small.identity, shard=shard) for shard in ("0/1", "0/2", "1/2"))
    # The store of a single rank keeps the folder without a rank in its name.
    assert alone.folder_name == f"uniform4-int8-{alone.digest.hex()[:16]}"
    for rank, identity in enumerate(ranks):
        assert identity.folder_name.endswith(f"{identity.digest.hex()[:16]}-rank{rank}of2")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_an_unreadable_identity_is_refused_and_kept(make_store, small, tmp_path, content):
    make_store().close()
    path = tmp_path / "store" / "identity.json"
    path.write_bytes(content)
    with pytest.raises(PrefixStoreError, match=r"identity"):
        make_store()
    assert path.read_bytes() == content


def test_files_of_other_programs_are_left_alone(make_store, small, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    store = make_store()
    small.write(store, [1, 1])
    store.close()
    assert (folder / "notes.txt").read_text() == "mine"
    assert small.found(make_store(), [1, 1]) == (1, 1)


def test_a_file_of_our_name_that_is_not_ours_is_not_overwritten(make_store, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "anchors.data").write_text("a novel")
    with pytest.raises(PrefixStoreError, match=r"holds anchors.data but no identity.json"):
        make_store()
    assert (folder / "anchors.data").read_text() == "a novel"


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_something_that_is_no_file_is_one_clear_error(make_store, small, tmp_path, kind):
    make_store().close()
    path = tmp_path / "store" / "residuals.data"
    path.unlink()
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(PrefixStoreError, match=r"cannot write to prefix store .*residuals.data"):
        make_store()
    with pytest.raises(PrefixStoreError, match=r"cannot read prefix store .*residuals.data"):
        open_reader(tmp_path / "store", small.identity)


def test_a_folder_that_is_a_file_or_not_there(make_store, small, tmp_path):
    with pytest.raises(PrefixStoreError, match="there is no prefix store in"):
        open_reader(tmp_path / "store", small.identity)
    (tmp_path / "store").write_text("")
    with pytest.raises(PrefixStoreError, match="cannot write to prefix store"):
        make_store()


def test_a_read_only_folder_can_be_read_and_not_written(make_store, small, tmp_path):
    store = make_store()
    small.write(store, [1, 1])
    store.close()

    def read_only_disk(path, writable):
        if writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return DiskFile(path, writable)

    with pytest.raises(
        PrefixStoreError, match=r"cannot write to prefix store .*Read-only file system"
    ):
        make_store(open_file=read_only_disk)
    reader = open_reader(tmp_path / "store", small.identity, open_file=read_only_disk)
    assert small.found(reader, [1, 1]) == (1, 1)
    reader.close()


def test_an_error_while_opening_lets_the_lock_go(make_store, files):
    files.failing = {"open"}
    with pytest.raises(PrefixStoreError):
        make_store()
    files.failing = set()
    make_store()
