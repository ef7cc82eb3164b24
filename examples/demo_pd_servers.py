"""The four processes of the demo: prefill, decode, the door, and one server to compare with."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from rich.console import Console

from kvspec_testkit.servers.http_process import HttpProcess
from kvspec_testkit.servers.port_lease import PortLease
from kvspec_testkit.servers.server_pair import ServerPair
from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess

START_TIMEOUT_S = 600.0
PREFILL_ARGUMENTS = (
    # In GB/s: the residuals of 4000 tokens take about two seconds.
    "--kvspec-link-gbps=0.015",
    # Prefill each prompt in one chunk. Both streams then begin when the prefill ends, as the
    # picture assumes. With more chunks, most pages would be sent before the prefill ends.
    "--chunked-prefill-size=8192",
)


class PdServers:
    """The four processes, as a context manager that starts all and stops them at the end."""

    def __init__(self, model: Path, log_folder: Path) -> None:
        arguments = (
            *CPU_ARGUMENTS,
            f"--model-path={model}",
            "--max-total-tokens=16384",
            "--kvspec",
        )
        self._pair = ServerPair(arguments, log_folder=log_folder, prefill=PREFILL_ARGUMENTS)
        self._ordinary = ServerProcess(arguments, log_path=log_folder / "one-server.log")
        self._door_ports = PortLease()
        self._door = HttpProcess(
            (
                *(sys.executable, "-m", "sglang_kvspec.door"),
                f"--port={self._door_ports.http}",
                f"--prefill={self._pair.prefill.base_url}",
                f"--decode={self._pair.decode.base_url}",
            ),
            base_url=f"http://127.0.0.1:{self._door_ports.http}",
            log_path=log_folder / "door.log",
        )
        self._stack = ExitStack()

    @property
    def door_url(self) -> str:
        return self._door.base_url

    @property
    def ordinary_url(self) -> str:
        return self._ordinary.base_url

    def __enter__(self) -> PdServers:
        with ExitStack() as stack:
            stack.callback(self._door_ports.release)
            for process in (self._pair, self._ordinary, self._door):
                stack.enter_context(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def wait_healthy(self, console: Console) -> None:
        """Return when all processes answer. Raises ServerStartError for the first that does not."""
        processes = {
            "prefill": self._pair.prefill,
            "decode": self._pair.decode,
            "one server": self._ordinary,
            "door": self._door,
        }
        with console.status("starting") as status:

            def show_wait(elapsed_s: float) -> None:
                for process in processes.values():
                    if process.returncode is not None:
                        process.wait_healthy(0)
                waited_s = time.monotonic() - started
                status.update(f"starting {name}, {waited_s:.0f} s (takes a minute or two)")

            started = time.monotonic()
            for name, process in processes.items():
                process.wait_healthy(START_TIMEOUT_S, on_wait=show_wait)
                console.print(
                    f"  {name}: {process.base_url}, log: {process.log_path}", soft_wrap=True
                )
