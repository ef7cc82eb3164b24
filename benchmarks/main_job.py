"""Collect the figures of the main job in one file: capacity, acceptance, start-up.

Acceptance comes from the result of bench_acceptance.py. Capacity and start-up are measured here, on
real servers, one after the other.

    python benchmarks/main_job.py
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvspec_testkit.servers.server_process import ServerProcess

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
DEMO_MODEL = REPOSITORY / "models" / "demo-5m"
EVAL_MODEL = REPOSITORY.parent / "shared" / "models" / "eval-31m"

START_TIMEOUT_S = 300.0
COMMON = ("--device=cpu", "--disable-overlap-schedule", "--sleep-on-idle", "--random-seed=0")
# Head size 128 in bf16. Eight requests keep the recent window in proportion to a small pool.
CAPACITY = (
    *COMMON,
    f"--model-path={EVAL_MODEL}",
    "--dtype=bfloat16",
    "--mem-fraction-static=0.15",
    "--max-running-requests=8",
    "--kvspec",
    "--kvspec-residual-hbm-fraction=0",
)
START = (
    *COMMON,
    f"--model-path={DEMO_MODEL}",
    "--dtype=float32",
    "--mem-fraction-static=0.1",
    "--max-total-tokens=16384",
)

Figure = dict[str, Any]


def figure(
    name: str, value: float, unit: str, spread: float | None = None, baseline: Any = None
) -> Figure:
    return {"name": name, "value": value, "unit": unit, "spread": spread, "baseline": baseline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acceptance", type=Path, default=RESULTS / "acceptance.json")
    parser.add_argument("--starts", type=int, default=3, help="number of starts of each server")
    parser.add_argument("--out", type=Path, default=RESULTS / "main_job.json")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as logs:
        figures = [
            *capacity_figures(Path(logs), console),
            *acceptance_figures(args.acceptance),
            *start_figures(args.starts, Path(logs), console),
        ]
    write(args.out, figures, {"capacity": list(CAPACITY[4:]), "start": list(START[4:])})
    show(console, figures)


def capacity_figures(logs: Path, console: Console) -> list[Figure]:
    """Compare the tokens of a pool with those of a plain pool in the bytes that it really
    allocated."""
    if not EVAL_MODEL.exists():
        console.print(
            f"[yellow]capacity.vs_plain is not measured: {EVAL_MODEL} does not exist",
            soft_wrap=True,
        )
        return []
    with (
        server(CAPACITY, logs / "capacity.log") as running,
        urllib.request.urlopen(f"{running.base_url}/server_info") as reply,
    ):
        info = json.load(reply)
    pools = info["internal_states"][0]["kvspec"]["pools"]
    plain_tokens = pools["kv_bytes_allocated"] / pools["bytes_per_token_plain"]
    tokens = pools["max_total_num_tokens"]
    baseline = f"{plain_tokens:.0f} tokens of plain bf16 KV in the same bytes"
    return [
        figure("capacity.tokens", tokens, "tokens"),
        figure("capacity.vs_plain", round(tokens / plain_tokens, 3), "x", baseline=baseline),
    ]


def acceptance_figures(path: Path) -> list[Figure]:
    wanted = (
        "accept.log4.mean_of_32",
        "accept.log4.bits",
        "accept.uniform4.mean_of_32",
        "vnmse.log4",
        "vnmse.log4_int8",
    )
    found = {f["name"]: f for f in json.loads(path.read_text())["figures"]}
    return [found[name] for name in wanted]


def start_figures(starts: int, logs: Path, console: Console) -> list[Figure]:
    """Measure the seconds from launch to healthy. The two servers take turns, so that drift of the
    machine affects both."""
    seconds: dict[str, list[float]] = {"plain": [], "kvspec": []}
    for turn in range(starts):
        for label, flags in (("plain", ()), ("kvspec", ("--kvspec",))):
            begun = time.monotonic()
            with server((*START, *flags), logs / f"{label}-{turn}.log"):
                seconds[label].append(time.monotonic() - begun)
            console.print(f"start {turn + 1} of {starts}, {label}: {seconds[label][-1]:.1f} s")
    plain, kvspec = (statistics.median(seconds[label]) for label in ("plain", "kvspec"))
    spread = max(max(times) - min(times) for times in seconds.values())
    return [
        figure("start.plain_seconds", round(plain, 1), "s"),
        figure(
            "start.extra_seconds",
            round(kvspec - plain, 1),
            "s",
            spread=round(spread, 1),
            baseline=f"plain SGLang: {plain:.1f} s, medians of {starts}",
        ),
    ]


@contextmanager
def server(arguments: Sequence[str], log_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(arguments, log_path=log_path) as running:
        running.wait_healthy(START_TIMEOUT_S)
        yield running


def write(path: Path, figures: list[Figure], settings: dict[str, Any]) -> None:
    git = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    record = {
        "bench": "main_job",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()} CPU; acceptance: see acceptance.json",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("sglang", "torch", "sglang-kvspec")},
        "settings": settings,
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def show(console: Console, figures: Sequence[Figure]) -> None:
    table = Table("figure", "value", "unit", "spread", "compared with")
    for row in figures:
        cells = (row[key] for key in ("name", "value", "unit", "spread", "baseline"))
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    console.print(table)


if __name__ == "__main__":
    main()
