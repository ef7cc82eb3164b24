"""Process of a prefix server that servers share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_EXIT_S = 20.0


class PrefixServerProcess:
    """Process of `python -m sglang_kvspec.transport.prefix_server`. A restart keeps the port."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str] | None = None, *, gb: float = 0.5
    ) -> None:
        """environment: overrides the caller's. gb: GiB on disk."""
        self._folder, self._port, self._gb = folder, "0", gb
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server. Returns when the server listens."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang_kvspec.transport.prefix_server"),
                *("--dir", str(self._folder), "--port", self._port, "--gb", str(self._gb)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        assert "tcp://" in first, f"the prefix server printed {first!r}, expected its address"
        self._port = first.strip().rpartition(":")[2]

    def stall(self) -> None:
        """Stop the process with SIGSTOP: its sockets stay open, but are not read."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=_EXIT_S)
            self._process = None
