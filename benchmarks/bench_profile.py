"""Break down the time of a steady round on a GPU, and compare it with the time for its bytes.

    python benchmarks/bench_profile.py --point 8b:32k:16 --system exact --codec uniform4
    python benchmarks/bench_profile.py --parse .kvspec/bench_serving/8b.32k.bs16-exact.run.json

One server is started as in bench_serving.py. Prompts are sent once for one token, and again, from
the prefix cache, for --output-len tokens. After some rounds of all requests, SGLang's torch
profiler records --steps rounds (decode steps on plain SGLang) and two more that do not count.
Kernels of draft-step graphs form one phase; verification and housekeeping form the other. The time
of each phase is divided by kernel name among attention, matrix products and so on. The floor is the
time to read the necessary weights, anchors and residuals at the bandwidth of a copy. The bandwidth
is that of bench_attention.py on such a GPU, or --bandwidth-tbps. One sentence describes each of the
three largest gaps to the floor.

Models with dummy weights (`8b`, `32b`) have no acceptance of their own. Acceptance is replayed from
a curve of bench_acceptance.py, as in bench_serving.py, and every table says so. The profiler slows
a round down, mostly kernel launches. The report says how much; read idle time with that in mind.

The trace and the facts of the run stay in --logs, where --parse reads them again without a GPU.
With --parse, --commit names the commit of the run. Without a GPU, a server can be profiled, but the
trace has no kernels to divide: exit status 1. Without an installed checkout, set
PYTHONPATH=.:kernels:patches:testkit (see bench_serving.py).
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import requests
from acceptance.report import current_commit
from rich.console import Console
from serving import machine
from serving.arguments import RESULTS, add_server_options
from serving.breakdown import Breakdown
from serving.client import BenchError, OutOfTime
from serving.curve import write_acceptance
from serving.floor import arithmetic_ms, copy_bandwidth, device_of, floor_ms, work_of
from serving.launch import CURVE, live_server
from serving.points import MAX_CONCURRENCY, Point, parse_points
from serving.profile_report import DRAFTING, PLAIN, ProfileReport
from serving.profiled_run import ProfiledRun, take_profile
from serving.systems import SYSTEMS
from serving.trace import TraceError, read_trace
from serving.trace_rounds import steady_rounds

from kvspec_testkit.servers.server_process import ServerStartError
from sglang_kvspec.planning.model_shape import ModelShape

START_TIMEOUT_S = 300.0
DRAFTING_STEPS, PLAIN_STEPS = 3, 12
ATTENTION_RESULTS = RESULTS / "attention_h200.json"
console = Console(width=150)


def main() -> int:
    args = _arguments()
    # SIGTERM interrupts like Ctrl-C, so that the server is stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_path = args.parse or profile(args)
        report(args, run_path)
    except OutOfTime:
        console.print("the run reached --time-limit")
    except KeyboardInterrupt:
        return 130
    except (ServerStartError, BenchError, TraceError, requests.RequestException) as error:
        console.print(str(error), markup=False)
        if not args.parse:
            console.print(f"the servers' logs are in {args.logs}")
    else:
        return 0
    return 1


def profile(args: argparse.Namespace) -> Path:
    """Profile a server. Keep the trace in --logs, beside the returned file, which holds the other
    facts of the run."""
    point, system = args.point, SYSTEMS[args.system]
    steps = args.steps or (PLAIN_STEPS if system.target is None else DRAFTING_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        traces = scratch / "traces"
        traces.mkdir()
        source = write_acceptance(args.traces, args.curve, args.codec, scratch / CURVE)
        on_gpu = bool(machine.gpu_names())
        with live_server(
            point.model,
            system,
            args,
            scratch,
            on_gpu=on_gpu,
            max_running=point.concurrency,
            deadline=time.monotonic() + args.time_limit,
            facts={
                "first_start": True,
                "machine": machine.describe(),
                "commit": args.commit or current_commit(),
            },
        ) as server:
            console.print(f"{point.label} {system.name}: starting")
            console.print(f"healthy after {server.start(START_TIMEOUT_S):.0f} s")
            run, trace = take_profile(
                server,
                point,
                target=system.target,
                codec=args.codec,
                source=source,
                output_len=args.output_len,
                steps=steps,
                activities=args.activities,
                folder=traces,
            )
        kept = args.logs / f"{point.label}-{system.name}.run.json"
        run.write(kept)
        shutil.copy(trace, _trace_beside(kept))
    console.print(f"profiled: {_trace_beside(kept)}")
    return kept


def report(args: argparse.Namespace, run_path: Path) -> None:
    """Write --out and print the table. Raises TraceError."""
    run = ProfiledRun.read(run_path)
    if args.commit:
        run = replace(run, commit=args.commit)
    events = read_trace(_trace_beside(run_path))
    rounds = steady_rounds(events, drafting=run.target is not None)
    bandwidth = _bandwidth(args, run.machine)
    shape = ModelShape.from_config(run.model_config).of_rank(run.tp_size)
    work = work_of(run, shape, sum(len(round.steps) for round in rounds) / len(rounds))
    device = device_of(run.machine)
    breakdown = Breakdown(
        rounds,
        floor_ms(work, bandwidth),
        {} if device is None else arithmetic_ms(work, shape, device),
        PLAIN if run.target is None else DRAFTING,
    )
    found = ProfileReport(run, breakdown, bandwidth)
    out = args.out or RESULTS / f"profile_{run.label.replace('.', '_')}_{run.system}.json"
    found.write(out)
    for line in found.console():
        # Names of kernels have brackets, which are not markup.
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {out}")


def _trace_beside(run_path: Path) -> Path:
    return run_path.with_name(run_path.name.removesuffix(".run.json") + ".trace.json.gz")


def _bandwidth(args: argparse.Namespace, name: str) -> float:
    if args.bandwidth_tbps:
        return float(args.bandwidth_tbps * 1e12)
    found = copy_bandwidth(ATTENTION_RESULTS, name)
    if found is None:
        raise BenchError(
            f"{ATTENTION_RESULTS.name} was not measured on {name}: give the bandwidth of a copy "
            "on this machine with --bandwidth-tbps"
        )
    return found


def _arguments() -> argparse.Namespace:
    """Return the arguments with `point` parsed. Exits if they make no sense or if the bandwidth for
    the floor is unknown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--point", metavar="MODEL:CONTEXT:CONCURRENCY")
    add("--system", choices=SYSTEMS, default="exact")
    add("--steps", type=int, help=f"rounds to measure (default: {DRAFTING_STEPS}; on plain "
        f"SGLang {PLAIN_STEPS} decode steps)")  # fmt: skip
    add("--output-len", type=int, default=1024, help="most tokens of an answer (default: 1024)")
    add("--activities", nargs="+", choices=("CPU", "GPU"), default=["CPU", "GPU"],
        help="activities to record; GPU alone slows a round down less (default: both)")  # fmt: skip
    add("--bandwidth-tbps", type=float, help="bandwidth of a copy in TB/s, bytes read plus bytes "
        f"written (default: from {ATTENTION_RESULTS.name})")  # fmt: skip
    add_server_options(parser)
    add("--time-limit", type=float, default=300,
        help="seconds after which the server is stopped (default: 300)")  # fmt: skip
    add("--out", type=Path,
        help="result file (default: benchmarks/results/profile_POINT_SYSTEM.json)")  # fmt: skip
    add("--parse", type=Path, metavar="RUN.json", help="report on an earlier run; measure nothing")
    args = parser.parse_args()
    if bool(args.point) == bool(args.parse):
        parser.error("give either --point, to profile a server, or --parse, to read an earlier run")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.point:
        args.point = _point(parser, args.point)
        if machine.gpu_names():
            try:
                _bandwidth(args, machine.describe())
            except BenchError as error:
                parser.error(str(error))
    return args


def _point(parser: argparse.ArgumentParser, text: str) -> Point:
    try:
        points = parse_points([text])
    except ValueError as error:
        parser.error(str(error))
    if len(points) != 1 or points[0].concurrency == MAX_CONCURRENCY:
        parser.error(
            f"--point must be one point with a number of requests, such as 8b:32k:16, got {text!r}"
        )
    return points[0]


if __name__ == "__main__":
    sys.exit(main())
