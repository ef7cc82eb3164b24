"""`make demo`: the same requests with --kvspec and on plain SGLang. Exits with 0 for equal text."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from demo_chat import run_chats
from demo_code import run_code
from demo_report import ServerRun, differences, show
from demo_requests import Stage
from rich.console import Console
from rich.markup import escape

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess, ServerStartError

REPOSITORY = Path(__file__).resolve().parent.parent
CODE_MODEL = REPOSITORY / "models" / "demo-5m"
LOG_FOLDER = REPOSITORY / ".kvspec" / "demo"
REPORT = LOG_FOLDER / "report.json"

# Each request keeps its newest pages in full precision. Few requests leave memory for more pages.
SIZES = ("--mem-fraction-static=0.2", "--max-running-requests=8", "--max-total-tokens=16384")
START_TIMEOUT_S = 300.0
INFO_TIMEOUT_S = 60.0
LOG_LINE_CHARACTERS = 100


@dataclass(frozen=True)
class Demo:
    """A model and its stages. stages(base_url, folder) yields each stage when it ends."""

    model: str
    folder: Path
    stages: Callable[[str, Path], Iterator[Stage]]


def main() -> int:
    signal.signal(signal.SIGTERM, _exit_on_signal)
    console = Console()
    demo = choose(console)
    try:
        kvspec = run_on(console, demo, "KVSpec", ("--kvspec",))
        plain = run_on(console, demo, "plain SGLang", ())
    except ServerStartError as error:
        console.print(f"[red]{escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the server is stopped")
        return 130
    show(console, demo.model, kvspec, plain)
    differing = differences(kvspec, plain)
    runs = {run.label: asdict(run) for run in (kvspec, plain)}
    report = {"model": demo.model, "runs": runs, "differences": differing}
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if any(position is not None for position in differing.values()):
        console.print("[red]The outputs differ.")
        return 1
    console.print("[green]All outputs are equal, character by character.")
    return 0


def choose(console: Console) -> Demo:
    """Return the demo of the chat model, or of the small model if the chat model is unavailable."""
    sys.path.insert(0, str(REPOSITORY / "models"))
    from smollm2 import DEFAULT_FOLDER, ModelUnavailable, ensure

    try:
        with console.status(f"preparing SmolLM2-135M-Instruct in {DEFAULT_FOLDER}"):
            folder = ensure()
    except ModelUnavailable as unavailable:
        console.print(f"[yellow]{escape(str(unavailable))}; the demo runs demo-5m instead.")
        return Demo("demo-5m", CODE_MODEL, run_code)
    return Demo("SmolLM2-135M-Instruct", folder, run_chats)


def run_on(console: Console, demo: Demo, label: str, flags: tuple[str, ...]) -> ServerRun:
    """Start a server, run all stages on it, and stop it in any case."""
    log_path = LOG_FOLDER / f"{label.lower().replace(' ', '-')}.log"
    folder = demo.folder.relative_to(REPOSITORY)
    command = " ".join((f"python -m sglang.launch_server --model-path {folder} ...", *flags))
    console.print(f"[bold]{label}[/]: {command}")
    arguments = (*CPU_ARGUMENTS, f"--model-path={demo.folder}", *SIZES, *flags)
    with ServerProcess(arguments, log_path=log_path) as server:
        start_s = wait_for(console, server)
        try:
            stages = answered(console, demo.stages(server.base_url, demo.folder))
            return ServerRun(label, start_s, stages, kvspec_report(server.base_url))
        except Exception:
            console.print(f"[red]The request failed. The end of {log_path}:")
            console.print(escape(server.log_tail()))
            raise


def wait_for(console: Console, server: ServerProcess) -> float:
    """Wait until the server is healthy, and show its last log line. Returns the seconds."""
    with console.status("starting") as status:

        def show_wait(elapsed_s: float) -> None:
            line = escape(server.log_tail(1)[:LOG_LINE_CHARACTERS])
            status.update(f"starting, {elapsed_s:.0f} s (takes about half a minute) [dim]{line}")

        start_s = server.wait_healthy(START_TIMEOUT_S, on_wait=show_wait)
    console.print(f"  healthy after {start_s:.0f} s, log: {server.log_path}")
    return start_s


def answered(console: Console, stages: Iterator[Stage]) -> tuple[Stage, ...]:
    """Return all stages, and print each stage when it ends."""
    found = []
    with console.status("answering ..."):
        for stage in stages:
            console.print(f"  {stage.name}: {stage.num_tokens} tokens in {stage.elapsed_s:.1f} s")
            found.append(stage)
    return tuple(found)


def kvspec_report(base_url: str) -> dict[str, Any]:
    """Return the kvspec section of /server_info, empty if the server runs without --kvspec."""
    with urllib.request.urlopen(f"{base_url}/server_info", timeout=INFO_TIMEOUT_S) as reply:
        states = json.load(reply).get("internal_states") or [{}]
    return dict(states[0].get("kvspec") or {})


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    # SystemExit is an exception, so that the running server is stopped.
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
