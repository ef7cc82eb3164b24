"""A regular file, read and written at offsets."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

Bytes = bytes | bytearray | memoryview

# Most buffers that the kernel takes in one call. A short read is continued in another call.
MAX_BUFFERS = 1024


class StoreFile(Protocol):
    """File of a store. All methods raise OSError."""

    def size(self) -> int: ...

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers in turn from `offset` on. Return the number of bytes read, which is less
        than their size only at the end of the file."""
        ...

    def write(self, offset: int, content: Bytes) -> None: ...

    def truncate(self, num_bytes: int) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


OpenFile = Callable[[Path, bool], StoreFile]


class DiskFile:
    """StoreFile on disk. It is not mapped: a bad block is an OSError here, and a SIGBUS there."""

    def __init__(self, path: Path, writable: bool) -> None:
        access = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        # O_NONBLOCK: if the path is a pipe, do not wait for its other end.
        self._fd = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise OSError(f"{path} is not a regular file")

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        done = 0
        left = list(buffers)
        while left:
            count = os.preadv(self._fd, left[:MAX_BUFFERS], offset + done)
            if count == 0:
                break
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        return done

    def write(self, offset: int, content: Bytes) -> None:
        left = memoryview(content)
        while left:
            count = os.pwrite(self._fd, left, offset)
            offset += count
            left = left[count:]

    def truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
