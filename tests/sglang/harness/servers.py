"""Specifications of servers that tests need, and the servers that are alive at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from harness.client import GenerateClient

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess

# Most of this time is for imports, in three processes, or eight for two servers of two ranks. A
# busy machine takes several times as long.
START_TIMEOUT_S = 480.0

Announce = Callable[[str], None]


@dataclass(frozen=True)
class ServerSpec:
    """Command line and environment of a server. Equal specs may share one process.

    `arguments` come after those that every CPU server needs, and so override them.
    """

    model: Path
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        settings = [f"{name}={value}" for name, value in self.environment]
        return " ".join([self.model.name, *self.arguments, *settings])

    @property
    def is_plain(self) -> bool:
        return "--kvspec" not in self.arguments


@dataclass(frozen=True)
class _Running:
    spec: ServerSpec
    server: ServerProcess

    @property
    def is_alive(self) -> bool:
        return self.server.returncode is None


class ServerSwitch:
    """At most one live server with --kvspec, and one plain server. The plain server stays up, since
    later tests compare with it again.

    use(spec) returns a client of a healthy server of that spec, and keeps the running one if its
    spec is equal.
    """

    def __init__(self, log_folder: Path, announce: Announce) -> None:
        self._log_folder = log_folder
        self._announce = announce
        self._plain: _Running | None = None
        self._tested: _Running | None = None
        self._num_started = 0

    def __enter__(self) -> ServerSwitch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
        _stop(self._plain)
        self._plain = None

    @property
    def log_path(self) -> Path:
        """Return the path of the log of the server with --kvspec."""
        assert self._tested is not None, "no server is in use"
        return self._tested.server.log_path

    def use(self, spec: ServerSpec) -> GenerateClient:
        """Return a client of a server of this spec. Raises ServerStartError, with the end of the
        log, where the server does not come up."""
        running = self._plain if spec.is_plain else self._tested
        if running is None or not running.is_alive or running.spec != spec:
            _stop(running)
            running = _Running(spec, self._start(spec))
        if spec.is_plain:
            self._plain = running
        else:
            self._tested = running
        return GenerateClient(running.server.base_url)

    def last_words(self) -> str | None:
        """Return the end of the log of a server that has ended by itself, or None."""
        for running in (self._tested, self._plain):
            if running is not None and not running.is_alive:
                return running.server.log_tail()
        return None

    def release(self) -> None:
        """Stop the server with --kvspec, if there is one."""
        _stop(self._tested)
        self._tested = None

    def kill(self) -> None:
        """Kill the server with --kvspec."""
        assert self._tested is not None, "no server is in use"
        self._tested.server.kill()
        self._tested = None

    def _start(self, spec: ServerSpec) -> ServerProcess:
        """Start a server and wait until it is healthy. A server that does not come up is
        stopped."""
        self._num_started += 1
        slug = re.sub(r"[^a-zA-Z0-9]+", "-", spec.label)[:80]
        server = ServerProcess(
            (*CPU_ARGUMENTS, f"--model-path={spec.model}", *spec.arguments),
            environment=dict(spec.environment),
            log_path=self._log_folder / f"{self._num_started:02d}-{slug}.log",
        )
        started = time.monotonic()
        server.start()
        server.wait_healthy(START_TIMEOUT_S)
        self._announce(f"server up in {time.monotonic() - started:.0f} s: {spec.label}")
        return server


def _stop(running: _Running | None) -> None:
    if running is not None:
        running.server.stop()
