"""Lock that allows one writing process per store, for as long as that process lives."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sglang_kvspec.core.errors import PrefixStoreError

LOCK_FILE = "writer.lock"


class WriterLock:
    """flock on a file that is never deleted. The kernel releases it when the process dies."""

    def __init__(self, directory: Path) -> None:
        """Take the lock. Raises PrefixStoreError if another process has it, OSError if the file
        cannot be opened or locked."""
        self._fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise PrefixStoreError(
                f"prefix store {directory} is being written by process {owner or 'unknown'}; "
                "stop that process or choose another folder"
            ) from None
        except OSError:
            os.close(self._fd)
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
