"""Process of `python -m sglang.launch_server`, in its own process group."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvspec_testkit.servers.http_process import HttpProcess, ServerStartError
from kvspec_testkit.servers.port_lease import PortLease

__all__ = ["CPU_ARGUMENTS", "CPU_ENVIRONMENT", "ServerProcess", "ServerStartError"]

# On a small machine, two SGLang processes with a thread pool each slow each other down tenfold.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# fp32, because bf16 near-ties flip with the shape of an attention call, also without KVSpec.
CPU_ARGUMENTS = (
    "--device=cpu",
    "--dtype=float32",
    "--disable-overlap-schedule",
    "--mem-fraction-static=0.1",
    "--random-seed=0",
    "--sleep-on-idle",
)


class ServerProcess(HttpProcess):
    """SGLang server. `arguments`: of `python -m sglang.launch_server`, without host and ports."""

    # The scheduler ends at once. The launcher then waits 5 s for traces of a crash.
    terminate_grace_s = 1.0

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._ports = PortLease()
        super().__init__(
            (
                sys.executable,
                "-m",
                "sglang.launch_server",
                *arguments,
                "--host=127.0.0.1",
                f"--port={self._ports.http}",
                f"--nccl-port={self._ports.rendezvous}",
            ),
            base_url=f"http://127.0.0.1:{self._ports.http}",
            log_path=log_path,
            environment={**CPU_ENVIRONMENT, **(environment or {})},
        )

    def stop(self) -> None:
        super().stop()
        self._ports.release()

    def kill(self) -> None:
        super().kill()
        self._ports.release()
