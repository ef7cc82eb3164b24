"""A prefill and a decode server side by side, on one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kvspec_testkit.servers.port_lease import PortLease
from kvspec_testkit.servers.server_process import ServerProcess


class ServerPair:
    """Starts, watches and stops both. Use it as a context manager, or call stop().

    `arguments` are those of both servers, model and --kvspec among them; what makes them a prefill
    and a decode server that find each other is added, and then `prefill` and `decode`. Logs go to
    log_folder, numbered in the order of starts.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log_folder: Path,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments, self._environment = tuple(arguments), environment
        self._own = {"prefill": tuple(prefill), "decode": tuple(decode)}
        self._log_folder = log_folder
        self._ports = PortLease()
        self._num_made = 0
        self.prefill = self._make("prefill")
        self.decode = self._make("decode")

    def __enter__(self) -> ServerPair:
        self.prefill.start()
        self.decode.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def bootstrap_port(self) -> int:
        return self._ports.http

    def wait_healthy(
        self, timeout_s: float, on_wait: Callable[[float], None] | None = None
    ) -> None:
        """Block until both are. Raises ServerStartError as ServerProcess.wait_healthy."""
        for server in (self.prefill, self.decode):
            server.wait_healthy(timeout_s, on_wait)

    def replace_prefill(self) -> ServerProcess:
        """Another prefill server, not started yet, in place of one that ended."""
        self.prefill.stop()
        self.prefill = self._make("prefill")
        return self.prefill

    def replace_decode(self, *arguments: str) -> ServerProcess:
        """The same of the decode server. arguments: besides those it had, and stronger."""
        self.decode.stop()
        self.decode = self._make("decode", *arguments)
        return self.decode

    def stop(self) -> None:
        """Safe to call more than once."""
        self.prefill.stop()
        self.decode.stop()
        self._ports.release()

    def _make(self, mode: str, *arguments: str) -> ServerProcess:
        self._num_made += 1
        return ServerProcess(
            (
                *self._arguments,
                f"--disaggregation-mode={mode}",
                "--disaggregation-transfer-backend=kvspec",
                f"--disaggregation-bootstrap-port={self.bootstrap_port}",
                *self._own[mode],
                *arguments,
            ),
            environment=self._environment,
            log_path=self._log_folder / f"{self._num_made:02d}-{mode}.log",
        )
