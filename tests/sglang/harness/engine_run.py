"""One question to one `sglang.Engine`, in a process of its own.

An engine that shuts down kills every child of its process. In the process of the tests it would
kill their servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from kvspec_testkit.servers.port_lease import PortLease
from kvspec_testkit.servers.server_process import CPU_ENVIRONMENT

_TIMEOUT_S = 600.0


def run_engine(options: dict[str, Any], question: dict[str, Any]) -> tuple[Any, Any]:
    """Return the result of `Engine(**options).generate(**question)`, and its get_server_info().

    Raises AssertionError, with all output, where the process fails.
    """
    ports = PortLease()
    own = {"port": ports.http, "nccl_port": ports.rendezvous}
    try:
        run = subprocess.run(
            (sys.executable, __file__, json.dumps({**options, **own}), json.dumps(question)),
            env={**os.environ, **CPU_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    finally:
        ports.release()
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    answer, info = json.loads(run.stdout.splitlines()[-1])
    return answer, info


def main() -> None:
    import sglang

    options, question = map(json.loads, sys.argv[1:])
    engine = sglang.Engine(**options)
    try:
        answers = engine.generate(**question), engine.get_server_info()
    finally:
        engine.shutdown()
    print(json.dumps(answers, default=str), flush=True)


# An engine starts its schedulers by importing this file again.
if __name__ == "__main__":
    main()
