"""The four processes of the demo: prefill, decode, the door, and one server to compare with."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from rich.console import Console

from sglang_kvspec.testing.http_process import HttpProcess
from sglang_kvspec.testing.port_lease import PortLease
from sglang_kvspec.testing.server_process import CPU_ARGUMENTS, ServerProcess

START_TIMEOUT_S = 600.0
# GB/s: the residuals of 4000 tokens take a second or two.
LINK_GBPS = "0.015"


class PdServers:
    """Use it as a context manager: leaving stops whatever start() started."""

    def __init__(self, model: Path, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._arguments = (
            *CPU_ARGUMENTS,
            f"--model-path={model}",
            "--max-total-tokens=16384",
            "--kvspec",
        )
        # One for the bootstrap port, one for the door.
        self._leases = (PortLease(), PortLease())
        self._stack = ExitStack()
        for lease in self._leases:
            self._stack.callback(lease.release)
        self._servers = {
            "prefill": self._apart("prefill", f"--kvspec-link-gbps={LINK_GBPS}"),
            "decode": self._apart("decode"),
            "one server": self._server("one-server"),
        }
        self._door = self._make_door()

    @property
    def door_url(self) -> str:
        return self._door.base_url

    @property
    def ordinary_url(self) -> str:
        return self._servers["one server"].base_url

    def __enter__(self) -> PdServers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self, console: Console) -> None:
        """Return when all of them answer. Raises ServerStartError for the first that does not."""
        processes: dict[str, HttpProcess] = {**self._servers, "door": self._door}
        for process in processes.values():
            self._stack.enter_context(process)
        with console.status("starting") as status:

            def show_wait(elapsed_s: float) -> None:
                for process in processes.values():
                    if process.returncode is not None:
                        process.wait_healthy(0)
                status.update(f"{name}: starting, takes a minute or two ({elapsed_s:.0f} s)")

            for name, process in processes.items():
                process.wait_healthy(START_TIMEOUT_S, on_wait=show_wait)
                console.print(f"  {name}: {process.base_url}, log: {process.log_path}")

    def _apart(self, mode: str, *arguments: str) -> ServerProcess:
        return self._server(
            mode,
            f"--disaggregation-mode={mode}",
            "--disaggregation-transfer-backend=kvspec",
            f"--disaggregation-bootstrap-port={self._leases[0].http}",
            *arguments,
        )

    def _server(self, name: str, *arguments: str) -> ServerProcess:
        path = self._log_folder / f"{name}.log"
        return ServerProcess((*self._arguments, *arguments), log_path=path)

    def _make_door(self) -> HttpProcess:
        port = self._leases[1].http
        command = [sys.executable, "-m", "sglang_kvspec.door", f"--port={port}"]
        for role in ("prefill", "decode"):
            command.append(f"--{role}={self._servers[role].base_url}")
        return HttpProcess(
            command, base_url=f"http://127.0.0.1:{port}", log_path=self._log_folder / "door.log"
        )
