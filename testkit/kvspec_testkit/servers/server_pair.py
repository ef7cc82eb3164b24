"""A prefill and a decode server side by side, on one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kvspec_testkit.servers.port_lease import PortLease
from kvspec_testkit.servers.server_process import ServerProcess


class ServerPair:
    """Prefill server and decode server. Use it as a context manager, or call stop().

    `arguments`: arguments of both servers, with model and --kvspec. The flags of disaggregation are
    added, then `prefill` or `decode`. Logs go to log_folder, numbered in the order in which servers
    are made.
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
        """Block until both servers are healthy. Raises ServerStartError like
        ServerProcess.wait_healthy."""
        for server in (self.prefill, self.decode):
            server.wait_healthy(timeout_s, on_wait)

    def replace_prefill(self) -> ServerProcess:
        """Stop the prefill server, and return its replacement, which is not started yet."""
        self.prefill.stop()
        self.prefill = self._make("prefill")
        return self.prefill

    def replace_decode(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> ServerProcess:
        """Stop the decode server, and return its replacement, which is not started yet. arguments:
        added to those of the pair, and stronger. environment: instead of the pair's."""
        self.decode.stop()
        self.decode = self._make("decode", *arguments, environment=environment)
        return self.decode

    def stop(self) -> None:
        """Stop both servers and release their ports. Safe to call more than once."""
        self.prefill.stop()
        self.decode.stop()
        self._ports.release()

    def _make(
        self, mode: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> ServerProcess:
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
            environment=self._environment if environment is None else environment,
            log_path=self._log_folder / f"{self._num_made:02d}-{mode}.log",
        )
