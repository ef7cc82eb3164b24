"""Which server a test needs, and the one server that is alive at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from harness.client import GenerateClient

from sglang_kvspec.testing.server_process import CPU_ARGUMENTS, ServerProcess

# Imports in three processes take most of it, several times over on a busy machine.
START_TIMEOUT_S = 240.0

Announce = Callable[[str], None]


@dataclass(frozen=True)
class ServerSpec:
    """Command line and environment of a server; equal specs may share one process.

    `arguments` come after those every CPU server needs, so they win over them.
    """

    model: Path
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        settings = [f"{name}={value}" for name, value in self.environment]
        return " ".join([self.model.name, *self.arguments, *settings])


class ServerSwitch:
    """Keeps at most one server alive: memory for one is all that may be there.

    use(spec) returns a client of a healthy server of that spec, the running one where it fits.
    """

    def __init__(self, log_folder: Path, announce: Announce) -> None:
        self._log_folder = log_folder
        self._announce = announce
        self._spec: ServerSpec | None = None
        self._server: ServerProcess | None = None
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

    @property
    def log_path(self) -> Path:
        """Log of the server in use."""
        assert self._server is not None, "no server is in use"
        return self._server.log_path

    def use(self, spec: ServerSpec) -> GenerateClient:
        """Raises ServerStartError, with the end of the log, where the server does not come up."""
        running = self._server is not None and self._server.returncode is None
        if not running or spec != self._spec:
            self.release()
            self._start(spec)
        assert self._server is not None
        return GenerateClient(self._server.base_url)

    def release(self) -> None:
        """Stop the server in use, if any."""
        if self._server is not None:
            self._server.stop()
        self._server = self._spec = None

    def kill(self) -> None:
        """End the server in use without a warning."""
        assert self._server is not None, "no server is in use"
        self._server.kill()
        self._server = self._spec = None

    def _start(self, spec: ServerSpec) -> None:
        self._num_started += 1
        slug = re.sub(r"[^a-zA-Z0-9]+", "-", spec.label)[:80]
        server = ServerProcess(
            (*CPU_ARGUMENTS, f"--model-path={spec.model}", *spec.arguments),
            environment=dict(spec.environment),
            log_path=self._log_folder / f"{self._num_started:02d}-{slug}.log",
        )
        self._spec, self._server = spec, server
        started = time.monotonic()
        server.start()
        server.wait_healthy(START_TIMEOUT_S)
        self._announce(f"server up in {time.monotonic() - started:.0f} s: {spec.label}")
