"""`make demo`: one program on SGLang with --kvspec and on plain SGLang. Status 0: same text."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from demo_program import (
    PROGRAM_SOURCE,
    PROMPT_TOKENS,
    STREAM_SOURCE,
    run_program,
)
from demo_report import ServerRun, differences, show
from demo_requests import Stage, read_source, run_stream
from rich.console import Console
from rich.markup import escape

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess, ServerStartError

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "models" / "demo-5m"
LOG_FOLDER = REPOSITORY / ".kvspec" / "demo"

SERVER_ARGUMENTS = (*CPU_ARGUMENTS, f"--model-path={MODEL}", "--max-total-tokens=16384")
START_TIMEOUT_S = 300.0
INFO_TIMEOUT_S = 60.0
LOG_LINE_CHARACTERS = 100


def main() -> int:
    signal.signal(signal.SIGTERM, _exit_on_signal)
    console = Console()
    try:
        kvspec = run_on(console, "KVSpec", ("--kvspec",))
        plain = run_on(console, "plain SGLang", ())
    except ServerStartError as error:
        console.print(f"[red]{escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the server is stopped")
        return 130
    show(console, kvspec, plain)
    if any(position is not None for position in differences(kvspec, plain).values()):
        console.print("[red]The outputs differ.")
        return 1
    console.print("[green]All outputs are equal, character by character.")
    return 0


def run_on(console: Console, label: str, flags: tuple[str, ...]) -> ServerRun:
    """Start a server, run the program and the stream on it, and stop it, whatever happens."""
    log_path = LOG_FOLDER / f"{label.lower().replace(' ', '-')}.log"
    command = " ".join(("python -m sglang.launch_server --model-path models/demo-5m ...", *flags))
    console.print(f"[bold]{label}[/]: {command}")
    with ServerProcess((*SERVER_ARGUMENTS, *flags), log_path=log_path) as server:
        start_s = wait_for(console, server)
        program_source = read_source(MODEL, *PROGRAM_SOURCE, PROMPT_TOKENS)
        stream_source = read_source(MODEL, *STREAM_SOURCE, PROMPT_TOKENS)
        try:
            stages = (
                timed(console, lambda: run_program(server.base_url, program_source)),
                timed(console, lambda: run_stream(server.base_url, str(MODEL), stream_source)),
            )
            return ServerRun(label, start_s, stages, kvspec_report(server.base_url))
        except Exception:
            console.print(f"[red]The request failed. The end of {log_path}:")
            console.print(escape(server.log_tail()))
            raise


def wait_for(console: Console, server: ServerProcess) -> float:
    """Seconds until the server was healthy, with its last log line shown meanwhile."""
    with console.status("starting") as status:

        def show_wait(elapsed_s: float) -> None:
            line = escape(server.log_tail(1)[:LOG_LINE_CHARACTERS])
            status.update(f"starting, {elapsed_s:.0f} s (takes about half a minute) [dim]{line}")

        start_s = server.wait_healthy(START_TIMEOUT_S, on_wait=show_wait)
    console.print(f"  healthy after {start_s:.0f} s, log: {server.log_path}")
    return start_s


def timed(console: Console, run: Callable[[], Stage]) -> Stage:
    with console.status(f"answering a prompt of over {PROMPT_TOKENS} tokens ..."):
        stage = run()
    console.print(f"  {stage.name}: {stage.num_tokens} tokens in {stage.elapsed_s:.1f} s")
    return stage


def kvspec_report(base_url: str) -> dict[str, Any]:
    """The kvspec section of /server_info, empty where the server runs without --kvspec."""
    with urllib.request.urlopen(f"{base_url}/server_info", timeout=INFO_TIMEOUT_S) as reply:
        states = json.load(reply).get("internal_states") or [{}]
    return dict(states[0].get("kvspec") or {})


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    # An exception, so that the server in use is stopped on the way out.
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
