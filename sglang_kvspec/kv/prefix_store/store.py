"""Prefix stores on disk, opened by one process for writing and by any number for reading.

A store is a folder of six files: identity.json, writer.lock, and two files each for anchors and
residuals: .data with records and .index with their entries. Files of other names are left alone.

Bytes may reach the disk in any order. A record counts only if its entry is whole, by the entry's
own checksum, and if a read record matches the checksum in the entry. So a writer that is killed at
any byte loses only the page it was writing. A power failure loses pages that were not flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from sglang_kvspec.core.errors import ConfigError, PrefixStoreError
from sglang_kvspec.kv.prefix_store.budget import StoreLimits, TokenBucket
from sglang_kvspec.kv.prefix_store.catalogue import Catalogue, Tier
from sglang_kvspec.kv.prefix_store.committer import Committer
from sglang_kvspec.kv.prefix_store.disk_file import Bytes, DiskFile, OpenFile, StoreFile
from sglang_kvspec.kv.prefix_store.entries import HEADER_BYTES, EntryFormat
from sglang_kvspec.kv.prefix_store.identity import (
    IDENTITY_FILE,
    StoreIdentity,
    check_identity,
    write_identity,
)
from sglang_kvspec.kv.prefix_store.page_keys import PageLink
from sglang_kvspec.kv.prefix_store.reader import PrefixReader
from sglang_kvspec.kv.prefix_store.slab import Slab
from sglang_kvspec.kv.prefix_store.state import StoreState
from sglang_kvspec.kv.prefix_store.write_health import WriteHealth
from sglang_kvspec.kv.prefix_store.write_queue import WriteQueue
from sglang_kvspec.kv.prefix_store.writer_lock import WriterLock

SLAB_NAMES = ("anchors", "residuals")
# Readers have no limit of slots: the writer has one.
_UNBOUNDED = 1 << 62


class PrefixStore(PrefixReader):
    """Store that this process writes. All other calls must have returned before `close`."""

    def __init__(
        self, state: StoreState, close_files: Callable[[], None], queue: WriteQueue
    ) -> None:
        super().__init__(state, close_files)
        self._queue = queue

    def put(self, link: PageLink, anchor: Bytes, residual: Bytes | None = None) -> bool:
        """Store a copy of a page's records, all layers and heads. Never waits for the disk.

        Return True if the page is stored, or will be unless writing fails. Return False if the
        queue is full or closed, or if the page before it is neither stored nor queued. Put the
        pages of a prefix in order. To store an evicted residual again, put its page again.
        """
        identity, catalogue = self._state.identity, self._state.catalogue
        anchor = _record("anchor", anchor, identity.anchor_page_bytes)
        if residual is not None:
            residual = _record("residual", residual, identity.residual_page_bytes)
        # The queue is asked first: a page is in the catalogue before it leaves the queue.
        is_parent_pending = self._queue.is_pending(link.parent)
        with self._state.lock:
            if catalogue.page(link) is not None:
                catalogue.touch([link.key])
                if residual is None or catalogue.has(Tier.RESIDUAL, link.key):
                    return True
            if not (is_parent_pending or catalogue.is_reachable(link)):
                self._state.counters.orphans += 1
                return False
        if self._queue.put(link, anchor, residual):
            return True
        with self._state.lock:
            self._state.counters.refused += 1
        return False

    @property
    def waiting_bytes(self) -> int:
        """Bytes of pages that were put and are not on disk yet."""
        return self._queue.waiting_bytes

    def write_due(self) -> float | None:
        """Write the pages that may be written now, in a store without a thread; see WriteQueue."""
        return self._queue.write_due()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all pages that were put are on disk, safe even from a power failure. Return
        False if that takes longer than timeout_s, or fails."""
        return self._queue.flush(timeout_s) and self._sync()

    def close(self, timeout_s: float = 10.0) -> None:
        """Drop queued pages (`flush` first to keep them) and let other processes write."""
        if self._closed:
            return
        if self._queue.close(timeout_s):
            self._sync()
            super().close()
        else:
            # The disk hangs in a write: its file descriptors must not be reused for other files.
            self._closed = True

    def _sync(self) -> bool:
        try:
            for slab in self._state.slabs:
                slab.sync()
        except OSError:
            with self._state.lock:
                self._state.counters.write_errors += 1
            return False
        return True


def open_store(
    directory: Path,
    identity: StoreIdentity,
    limits: StoreLimits,
    *,
    clock: Callable[[], float] = monotonic,
    open_file: OpenFile = DiskFile,
    threaded: bool = True,
) -> PrefixStore:
    """Open a store for writing; make one if there is none. Raises PrefixStoreError if the folder
    belongs to another identity, is written by another process, or cannot be written. Raises
    ConfigError if the limits are too small."""
    layouts = _layouts(identity)
    num_slots = limits.slots(
        anchor_bytes=layouts[0].record_bytes + layouts[0].nbytes,
        residual_bytes=layouts[1].record_bytes + layouts[1].nbytes,
        fixed_bytes=2 * HEADER_BYTES,
    )
    page_bytes = identity.anchor_page_bytes + identity.residual_page_bytes
    if limits.queue_bytes < page_bytes:
        raise ConfigError(
            f"queue_bytes must be at least the {page_bytes} bytes of a page, got "
            f"{limits.queue_bytes}"
        )
    opened: list[Callable[[], None]] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened.append(WriterLock(directory).release)
        if not check_identity(directory, identity):
            _refuse_foreign(directory)
            write_identity(directory, identity)
        slabs = _open_slabs(directory, layouts, open_file, opened, writable=True)
        state = StoreState(identity, Catalogue(*num_slots), slabs, writable=True)
        for slab, count in zip(slabs, num_slots, strict=True):
            if not slab.has_header():
                state.counters.index_resets += slab.num_slots() > 0
                slab.start_empty()
            slab.shrink_to(count)
        state.load()
    except BaseException as error:
        _close_all(opened)
        if isinstance(error, OSError):
            raise PrefixStoreError(f"cannot write to prefix store {directory}: {error}") from error
        raise
    bucket = TokenBucket(limits.write_bytes_per_s, limits.write_burst_bytes, clock)
    committer = Committer(state, WriteHealth(directory, clock))
    queue = WriteQueue(committer.commit, limits.queue_bytes, bucket)
    if threaded:
        queue.start()
    return PrefixStore(state, lambda: _close_all(opened), queue)


def open_reader(
    directory: Path, identity: StoreIdentity, *, open_file: OpenFile = DiskFile
) -> PrefixReader:
    """Open a store for reading, while another process may write it. Raises PrefixStoreError if
    there is no store of this identity, or if its index cannot be read."""
    opened: list[Callable[[], None]] = []
    try:
        if not check_identity(directory, identity):
            raise PrefixStoreError(f"there is no prefix store in {directory}")
        slabs = _open_slabs(directory, _layouts(identity), open_file, opened, writable=False)
        for name, slab in zip(SLAB_NAMES, slabs, strict=True):
            if not slab.has_header():
                raise PrefixStoreError(
                    f"prefix store {directory}: {name}.index is damaged or of another version; "
                    "open the store for writing to start a new index"
                )
        state = StoreState(identity, Catalogue(_UNBOUNDED, _UNBOUNDED), slabs, writable=False)
        state.load()
    except BaseException as error:
        _close_all(opened)
        if isinstance(error, OSError):
            raise PrefixStoreError(f"cannot read prefix store {directory}: {error}") from error
        raise
    return PrefixReader(state, lambda: _close_all(opened))


def _layouts(identity: StoreIdentity) -> tuple[EntryFormat, EntryFormat]:
    return EntryFormat.of_anchors(identity), EntryFormat.of_residuals(identity)


def _open_slabs(
    directory: Path,
    layouts: Sequence[EntryFormat],
    open_file: OpenFile,
    opened: list[Callable[[], None]],
    *,
    writable: bool,
) -> tuple[Slab, Slab]:
    def opened_file(name: str) -> StoreFile:
        file = open_file(directory / name, writable)
        opened.append(file.close)
        return file

    anchors, residuals = (
        Slab(opened_file(f"{name}.data"), opened_file(f"{name}.index"), layout)
        for name, layout in zip(SLAB_NAMES, layouts, strict=True)
    )
    return anchors, residuals


def _refuse_foreign(directory: Path) -> None:
    ours = {f"{name}.{end}" for name in SLAB_NAMES for end in ("data", "index")}
    foreign = sorted(ours & {path.name for path in directory.iterdir()})
    if foreign:
        raise PrefixStoreError(
            f"{directory} holds {foreign[0]} but no {IDENTITY_FILE} of a prefix store; "
            "choose another folder"
        )


def _close_all(opened: list[Callable[[], None]]) -> None:
    # The lock was taken first and is released last.
    while opened:
        opened.pop()()


def _record(what: str, content: Bytes, num_bytes: int) -> memoryview:
    record = memoryview(content)
    if record.nbytes != num_bytes:
        raise ValueError(f"a page's {what} takes {num_bytes} bytes, got {record.nbytes}")
    return record.cast("B")
