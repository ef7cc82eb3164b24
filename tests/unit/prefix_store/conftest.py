"""Small prefix stores: pages of two tokens, records of a few bytes, and files that fail on
demand."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_kvspec.kv.prefix_store import StoreIdentity, StoreLimits, chain_links, open_store
from sglang_kvspec.kv.prefix_store.disk_file import DiskFile
from sglang_kvspec.kv.prefix_store.entries import HEADER_BYTES, EntryFormat

PAGE_SIZE = 2
IDENTITY = StoreIdentity(
    model="small",
    shard="0/1",
    codec="uniform4",
    settings="{}",
    target="int8",
    dtype="float32",
    page_size=PAGE_SIZE,
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    anchor_page_bytes=24,
    residual_page_bytes=40,
)


class Killed(BaseException):
    """Raised where the process dies, as seen by its files."""


class Files:
    """Opener of files that fail together. kill_after: bytes that still reach the disk before the
    process is dead. error: raised by every call named in `failing` whose path contains `at`."""

    def __init__(self) -> None:
        self.kill_after: int | None = None
        self.failing: set[str] = set()
        self.error = errno.EIO
        self.at = ""
        self.reads: list[tuple[str, int, int]] = []
        self.written = 0

    def __call__(self, path: Path, writable: bool) -> DiskFile:
        self.fail("open", path)
        return _File(path, writable, self)

    def fail(self, call: str, path: Path) -> None:
        if call in self.failing and self.at in path.name:
            raise OSError(self.error, os.strerror(self.error), path.name)


class _File(DiskFile):
    def __init__(self, path: Path, writable: bool, files: Files) -> None:
        super().__init__(path, writable)
        self._path = path
        self._files = files

    def read_into(self, offset: int, buffers: Any) -> int:
        self._files.fail("read", self._path)
        self._files.reads.append((self._path.name, offset, len(buffers)))
        return super().read_into(offset, buffers)

    def write(self, offset: int, content: Any) -> None:
        self._files.fail("write", self._path)
        left = self._files.kill_after
        if left is not None and len(content) > left:
            super().write(offset, memoryview(content)[:left])
            self._files.kill_after = 0
            raise Killed
        if left is not None:
            self._files.kill_after = left - len(content)
        super().write(offset, content)
        self._files.written += len(content)

    def sync(self) -> None:
        self._files.fail("sync", self._path)


def record(key: bytes, version: int, num_bytes: int) -> bytes:
    """Return the record that a test stores for a page. Records differ by page, version and tier."""
    seed = key[:6] + bytes([version, num_bytes])
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


def anchor_of(link: Any, version: int = 0) -> bytes:
    return record(link.key, version, IDENTITY.anchor_page_bytes)


def residual_of(link: Any, version: int = 0) -> bytes:
    return record(link.key, version, IDENTITY.residual_page_bytes)


def disk_bytes(num_pages: int, num_residuals: int | None = None) -> int:
    """Return the size of a store with room for these numbers of anchors and residuals."""
    anchors, residuals = EntryFormat.of_anchors(IDENTITY), EntryFormat.of_residuals(IDENTITY)
    anchor_bytes = anchors.record_bytes + anchors.nbytes
    residual_bytes = residuals.record_bytes + residuals.nbytes
    count = num_pages if num_residuals is None else num_residuals
    return 2 * HEADER_BYTES + num_pages * anchor_bytes + count * residual_bytes


def limits(num_pages: int, num_residuals: int | None = None, **options: Any) -> StoreLimits:
    count = num_pages if num_residuals is None else num_residuals
    # A little more than the exact share, since rounding could take the last slot away.
    share = min(1.0, (count + 0.01) / num_pages)
    room = disk_bytes(num_pages, num_residuals) + 4
    return StoreLimits(disk_bytes=room, residual_share=share, **options)


def links_of(tokens: Any, namespace: bytes = b"") -> list[Any]:
    return list(chain_links(tokens, PAGE_SIZE, namespace))


def read(reader: Any, pages: Any) -> tuple[list[bytes | None], list[bytes | None]]:
    """Return anchors and residuals of pages, None where there is none. Buffers start as 0xFF."""
    found = []
    for call, num_bytes in (
        (reader.read_anchors, IDENTITY.anchor_page_bytes),
        (reader.read_residuals, IDENTITY.residual_page_bytes),
    ):
        rows = [memoryview(bytearray(b"\xff" * num_bytes)) for _ in pages]
        done = call(pages, rows)
        assert all(good or not any(row) for good, row in zip(done, rows, strict=True))
        found.append([bytes(r) if good else None for good, r in zip(done, rows, strict=True)])
    return found[0], found[1]


def write_links(
    store: Any, links: Any, *, residuals: bool = True, version: int = 0, accepted: bool = True
) -> None:
    """Put the pages one after the other, and write them."""
    for link in links:
        residual = residual_of(link, version) if residuals else None
        assert store.put(link, anchor_of(link, version), residual) or not accepted
    store.write_due()


def write(store: Any, tokens: Any) -> None:
    """Put all pages of a prompt, whether the store accepts them or not."""
    write_links(store, links_of(tokens), accepted=False)


def found(store: Any, tokens: Any) -> tuple[int, int]:
    """Return how many anchors and residuals of a prompt can be read. Check that all of them are
    right."""
    anchors, residuals = read(store, store.lookup(tokens).pages)
    for link, anchor, residual in zip(links_of(tokens), anchors, residuals, strict=False):
        assert anchor in (None, anchor_of(link))
        assert residual in (None, residual_of(link))
    return sum(a is not None for a in anchors), sum(r is not None for r in residuals)


def held(store: Any, tokens: Any) -> tuple[int, int]:
    """Return (pages, complete pages) of a lookup. Check that every record is there and right."""
    hit = store.lookup(tokens)
    anchors, residuals = read(store, hit.pages)
    links = links_of(tokens)[: len(hit.pages)]
    assert anchors == [anchor_of(link) for link in links]
    complete = hit.num_complete
    assert residuals[:complete] == [residual_of(link) for link in links[:complete]]
    return len(hit.pages), complete


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """The names above, for tests, which cannot import this file."""
    return SimpleNamespace(
        identity=IDENTITY,
        page_size=PAGE_SIZE,
        anchor=anchor_of,
        residual=residual_of,
        links=links_of,
        limits=limits,
        read=read,
        write=write,
        write_links=write_links,
        found=found,
        held=held,
        Files=Files,
        Killed=Killed,
    )


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def make_store(tmp_path: Path, files: Files) -> Iterator[Callable[..., Any]]:
    """Return a function that opens stores in one folder, whose writes happen in `write_due`. The
    stores are closed after the test."""
    opened: list[Any] = []

    def make(num_pages: int = 8, num_residuals: int | None = None, **options: Any) -> Any:
        keywords = {
            name: options.pop(name)
            for name in ("clock", "threaded", "open_file")
            if name in options
        }
        store = open_store(
            tmp_path / "store",
            options.pop("identity", IDENTITY),
            limits(num_pages, num_residuals, **options),
            **{"open_file": files, "threaded": False, **keywords},
        )
        opened.append(store)
        return store

    yield make
    files.failing.clear()
    for store in opened:
        store.close()
