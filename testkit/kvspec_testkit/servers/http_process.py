"""A command that answers HTTP, in its own process group."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_POLL_S = 0.25
# The server answers /health by generating a token, which may wait behind a long prefill.
_HEALTH_TIMEOUT_S = 30.0


class ServerStartError(RuntimeError):
    """Failure of a server to become healthy in time. The message ends with the server's log."""


class HttpProcess:
    """Process of one server command. Use it as a context manager, or call stop().

    The command serves at `base_url` and answers /health with 200 when it is ready. `environment`
    overrides the caller's. Standard output and error go to `log_path`, which is overwritten.
    """

    # Seconds between SIGTERM and SIGKILL.
    terminate_grace_s = 8.0

    def __init__(
        self,
        command: Sequence[str],
        *,
        base_url: str,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command = tuple(command)
        self.base_url = base_url
        self.log_path = log_path
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def returncode(self) -> int | None:
        """Exit status of the launcher, None before start() and while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        assert self._process is None, "start() was called twice"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # With a separate group, Ctrl-C reaches only the caller, and stop() all children.
                start_new_session=True,
            )

    def wait_healthy(
        self, timeout_s: float, on_wait: Callable[[float], None] | None = None
    ) -> float:
        """Block until /health answers 200. Returns the seconds since this call.

        `on_wait(elapsed_s)` is called between polls. If the launcher exits or `timeout_s` pass,
        stops the server and raises ServerStartError.
        """
        started = time.monotonic()
        while True:
            elapsed_s = time.monotonic() - started
            if self.returncode is not None:
                raise self._start_error(f"the server exited with status {self.returncode}")
            if elapsed_s > timeout_s:
                raise self._start_error(f"the server was not healthy after {timeout_s:.0f} s")
            if self._answers_health():
                return time.monotonic() - started
            if on_wait is not None:
                on_wait(elapsed_s)
            time.sleep(_POLL_S)

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the server's log, or "" before start()."""
        if not self.log_path.exists():
            return ""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End the whole process group by SIGTERM, then SIGKILL. Safe to call more than once."""
        if self._process is not None:
            self.signal_group(signal.SIGTERM)
            try:
                self._process.wait(self.terminate_grace_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                # Schedulers may outlive a launcher that died first.
                self.signal_group(signal.SIGKILL)
                self._process.wait()

    def kill(self) -> None:
        """Kill the whole process group, as a crash of the machine would, and reap the launcher."""
        assert self._process is not None, "kill() was called before start()"
        self.signal_group(signal.SIGKILL)
        self._process.wait()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to every process of the server that still runs."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _answers_health(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"{self.base_url}/health", timeout=_HEALTH_TIMEOUT_S
            ) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _start_error(self, reason: str) -> ServerStartError:
        self.stop()
        return ServerStartError(f"{reason}; the end of {self.log_path}:\n{self.log_tail()}")
