"""A door in front of a prefill and a decode server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvspec_testkit.servers.http_process import HttpProcess
from kvspec_testkit.servers.port_lease import PortLease
from kvspec_testkit.servers.server_pair import ServerPair


@contextmanager
def open_door(pair: ServerPair, log_path: Path, timeout_s: float) -> Iterator[str]:
    """Yield the URL of a door to both servers, which must be healthy within timeout_s."""
    ports = PortLease()
    command = (
        *(sys.executable, "-m", "sglang_kvspec.door", f"--port={ports.http}"),
        f"--prefill={pair.prefill.base_url}",
        f"--decode={pair.decode.base_url}",
    )
    url = f"http://127.0.0.1:{ports.http}"
    try:
        with HttpProcess(command, base_url=url, log_path=log_path) as door:
            door.wait_healthy(timeout_s)
            yield url
    finally:
        ports.release()
