"""Queue of pages on their way to disk, bounded in bytes and in speed. No put waits for the disk."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from threading import Condition, Thread

from sglang_kvspec.kv.prefix_store.budget import TokenBucket
from sglang_kvspec.kv.prefix_store.committer import PagePut
from sglang_kvspec.kv.prefix_store.disk_file import Bytes
from sglang_kvspec.kv.prefix_store.page_keys import PageLink

logger = logging.getLogger(__name__)


class WriteQueue:
    """Queue that commits pages in the order in which they came: on a thread of its own after
    `start`, else whenever `write_due` is called."""

    def __init__(
        self, commit: Callable[[PagePut], None], max_bytes: int, bucket: TokenBucket
    ) -> None:
        self._commit = commit
        self._max_bytes = max_bytes
        self._bucket = bucket
        # The first page may be partly on disk.
        self._waiting: deque[PagePut] = deque()
        # Number of waiting pages by (key, has a residual).
        self._pending: Counter[tuple[bytes, bool]] = Counter()
        self._num_bytes = 0
        self._changed = Condition()
        self._is_closed = False
        self._thread: Thread | None = None

    def start(self) -> None:
        self._thread = Thread(target=self._run, name="kvspec-prefix-store", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        with self._changed:
            return self._num_bytes

    def is_pending(self, key: bytes) -> bool:
        with self._changed:
            return (key, True) in self._pending or (key, False) in self._pending

    def put(self, link: PageLink, anchor: Bytes, residual: Bytes | None) -> bool:
        """Queue a copy of a page, unless as much of it waits already. Return False if the queue is
        full or closed."""
        num_bytes = len(anchor) + len(residual or b"")
        with self._changed:
            if self._is_closed:
                return False
            if (link.key, True) in self._pending:
                return True
            if residual is None and (link.key, False) in self._pending:
                return True
            if self._num_bytes + num_bytes > self._max_bytes:
                return False
            put = PagePut(link, bytes(anchor), None if residual is None else bytes(residual))
            self._waiting.append(put)
            self._pending[link.key, residual is not None] += 1
            self._num_bytes += num_bytes
            self._changed.notify_all()
        return True

    def write_due(self) -> float | None:
        """Commit the pages that may be written now. Return the seconds until more may be written;
        None if no page waits or the queue was closed."""
        while True:
            with self._changed:
                if self._is_closed or not self._waiting:
                    return None
                put = self._waiting[0]
            delay_s = self._bucket.delay_s()
            if delay_s > 0:
                return delay_s
            self._bucket.take(put.nbytes)
            self._commit(put)
            with self._changed:
                self._waiting.popleft()
                self._forget(put)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is empty. Return False if that takes longer than timeout_s."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._waiting, timeout_s)
            return not self._waiting

    def close(self, timeout_s: float) -> bool:
        """Take no more pages, drop waiting pages, and finish the page that is being written. Return
        False if that takes longer than timeout_s: files must then stay open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                delay_s = self.write_due()
                with self._changed:
                    if self._is_closed:
                        return
                    if delay_s is not None or not self._waiting:
                        self._changed.wait(delay_s)
        except Exception:
            logger.exception(
                "KVSpec: the prefix store has stopped writing: new prefixes are not kept"
            )
            with self._changed:
                self._is_closed = True
                self._waiting.clear()
                self._pending.clear()
                self._changed.notify_all()

    def _forget(self, put: PagePut) -> None:
        self._num_bytes -= put.nbytes
        name = (put.link.key, put.residual is not None)
        self._pending[name] -= 1
        if not self._pending[name]:
            del self._pending[name]
