"""Compare the tokens per second of KVSpec and plain SGLang on live servers.

    python benchmarks/bench_serving.py --points 8b:32k:16 --systems bf16 int8
    python benchmarks/bench_serving.py --points 8b:32k:16,24,32,max --max-running 64
    python benchmarks/bench_serving.py --points ../shared/models/eval-31m:16k:8
    python benchmarks/bench_serving.py --merge one.points.jsonl other.points.jsonl

sglang.bench_serving sends the requests. One server is started per model and system; other flags are
the same. `8b` and `32b` are shapes with dummy weights (benchmarks/serving/shapes). Their acceptance
is replayed, from a curve of bench_acceptance.py or from traces of bench_views.py (--traces). Any
other model is a folder. With weights, its acceptance is real and its prompts are text. Every point
is written as soon as it is measured: its figures to --out, and its record to OUT.points.jsonl,
which --merge reads. --merge writes both files, too. A later run adds its points to
OUT.points.jsonl, and reports all points of that file: of a server's repeats the median, and of
several servers the last.

decode: prompts are sent once for one token, then again, from the prefix cache, for --output-len
tokens. Repeats of a decode pass use the same cached prompts. The rate covers the time in which all
requests decode. A system that drafts repeats the pass until 8 requests have decoded, and its rate
is that of all. end-to-end: prompts are sent once.

Without an installed checkout, set PYTHONPATH=.:kernels:patches:testkit, and add SGLang's folder if
SGLang is not installed either. The plug-ins' entry points are then derived from pyproject.toml.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

import requests
from acceptance.report import current_commit
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from serving import machine, records
from serving.arguments import PASSES, parse_arguments
from serving.client import BenchError, OutOfTime
from serving.curve import write_acceptance
from serving.identity import Identity, find_identity
from serving.launch import CURVE, acceptance_of, live_server
from serving.live_server import LiveServer
from serving.points import Model, Point, label
from serving.report import console_table, write_report
from serving.systems import SYSTEMS, System

from kvspec_testkit.servers.server_process import ServerStartError

START_TIMEOUT_S = 300.0
# Requests that decode at a point if the system drafts. How many drafts are accepted differs much
# between requests, and most replayed traces accept nearly all.
LEAST_REQUESTS = 8
console = Console(width=150)


class Run:
    """Measurement of the points of one command line."""

    def __init__(self, args: argparse.Namespace, points: list[Point], scratch: Path) -> None:
        self._args = args
        self._points = points
        self._scratch = scratch
        self._deadline = time.monotonic() + args.time_limit
        self._first_start = True
        self._commit = args.commit or current_commit()
        self._machine = machine.describe()
        _check_out(args, self._machine)
        self._on_gpu = bool(machine.gpu_names())
        self.source = write_acceptance(args.traces, args.curve, args.codec, scratch / CURVE)
        self.missing: list[str] = []
        self.failed = False

    def measure_all(self) -> None:
        """Measure model by model and system by system. Add points that fail, or that the time limit
        excludes, to `missing`."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        systems = [SYSTEMS[name] for name in self._args.systems]
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            self._progress = progress
            self._task = progress.add_task("", total=len(self._points) * len(systems))
            for model, group in groupby(self._points, key=lambda point: point.model):
                points = list(group)
                for system in systems:
                    self._measure_system(model, system, points)

    def _measure_system(self, model: Model, system: System, points: list[Point]) -> None:
        left = list(points)
        try:
            self._say(f"starting {model.name} {system.name}")
            with self._server(model, system, points) as server:
                started_s = server.start(START_TIMEOUT_S)
                console.print(f"{model.name} {system.name}: healthy after {started_s:.0f} s")
                self._first_start = False
                max_running = self._max_running(points)
                # The first repeat of a point leaves its prompts in the prefix cache.
                cached: Point | None = None
                while left:
                    point = left[0]
                    is_cached = point == cached and self._args.measure == "decode"
                    stays = self._measure_point(server, system, point, max_running, is_cached)
                    cached = point if stays else None
                    left.pop(0)
        except OutOfTime:
            self._miss(system, left, "the run reached --time-limit")
        except (ServerStartError, BenchError, requests.RequestException) as error:
            self.failed = True
            console.print(str(error), markup=False)
            self._miss(system, left, str(error))

    def _measure_point(
        self, server: LiveServer, system: System, point: Point, max_running: int, is_cached: bool
    ) -> bool:
        """Measure one point. If its requests fail, note the point as missing. Return whether its
        prompts are in the prefix cache now."""
        args = self._args
        point = server.resolve(point, args.output_len, max_running)
        self._say(f"{point.label} {system.name}")
        real_text = acceptance_of(point.model, args) == "real"
        passes = PASSES[args.measure]
        try:
            record = server.measure(
                point,
                args.output_len,
                passes,
                args.waves,
                real_text=real_text,
                is_cached=is_cached,
                least_requests=1 if system.target is None else LEAST_REQUESTS,
            )
        except BenchError as error:
            self.failed = True
            console.print(str(error), markup=False)
            self._miss(system, [point], str(error))
            return False
        records.append(_own_points(args), record)
        self._progress.advance(self._task)
        if record.note:
            console.print(f"{point.label} {system.name}: {record.note}")
        report(args, self.source)
        # The prompts of a dropped pass were not cached.
        return record.decode_rate is not None

    def _server(self, model: Model, system: System, points: list[Point]) -> LiveServer:
        return live_server(
            model,
            system,
            self._args,
            self._scratch,
            on_gpu=self._on_gpu,
            max_running=self._max_running(points),
            deadline=self._deadline,
            facts={
                "first_start": self._first_start,
                "machine": self._machine,
                "commit": self._commit,
            },
        )

    def _max_running(self, points: list[Point]) -> int:
        """Return the most running requests of a server. All systems get the same number: memory
        that a server keeps for each request is not available for KV."""
        return self._args.max_running or max(point.concurrency for point in points)

    def _say(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def _miss(self, system: System, points: list[Point], reason: str) -> None:
        for point in points:
            # Leave out the end of the log, which the error of a failed start contains.
            first_line = reason.splitlines()[0].split("; the end of")[0]
            self.missing.append(f"{point.label} {system.name}: {first_line}")
            self._progress.advance(self._task)


def main() -> int:
    args = parse_arguments(__doc__)
    # SIGTERM interrupts like Ctrl-C, so that servers are stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        if args.merge:
            merge(args)
            path = Path(scratch) / CURVE
            source = write_acceptance(args.traces, args.curve, args.codec, path)
            report(args, source, show=True)
            return 0
        run = Run(args, args.points, Path(scratch))
        try:
            run.measure_all()
        except KeyboardInterrupt:
            console.print("interrupted; the points measured so far are kept")
            return 130
    report(args, run.source, run.missing, show=True)
    return 1 if run.failed else 0


def merge(args: argparse.Namespace) -> None:
    """Write the records of --merge beside --out."""
    own = _own_points(args)
    if own.exists() and own.resolve() not in [path.resolve() for path in args.merge]:
        raise SystemExit(f"{own} has points already: add {own} to --merge, or give another --out")
    found = [record for path in args.merge for record in records.read(path)]
    _check_codec(args, found)
    records.write(own, records.consecutive(found) if args.consecutive else found)


def report(
    args: argparse.Namespace, source: str, missing: list[str] | None = None, show: bool = False
) -> None:
    """Rewrite --out from every point measured so far."""
    own = _own_points(args)
    found = records.latest(records.read(own) if own.exists() else [])
    if show:
        for line in console_table(found, source, missing or []):
            console.print(line)
    if found:
        identity = _identity(args, found[0].machine)
        write_report(args.out, found, source, missing or [], identity)
        if show:
            console.print(f"written: {args.out}")


def _own_points(args: argparse.Namespace) -> Path:
    return Path(args.out.with_suffix(".points.jsonl"))


def _check_out(args: argparse.Namespace, name: str) -> None:
    """Check, before anything is measured, that points in --out and the identity result fit this
    run. Raises SystemExit if not."""
    own = _own_points(args)
    found = records.read(own) if own.exists() else []
    others = {record.machine for record in found} - {name}
    if others:
        raise SystemExit(
            f"{own} has points of {others.pop()}, but this machine is {name}: give another --out"
        )
    _check_codec(args, found)
    _identity(args, name)


def _check_codec(args: argparse.Namespace, found: list[records.Record]) -> None:
    """Check that replayed points have the codec of --codec: the report names one curve for all.
    Raises SystemExit if not."""
    flag = f"--kvspec-codec={args.codec}"
    for record in found:
        if record.acceptance == "replayed" and flag not in record.server_arguments:
            place = f"{label(record.model, record.context_len, record.concurrency)} {record.system}"
            raise SystemExit(
                f"{place} was not measured with {flag}: give the codec of this point with --codec"
            )


def _identity(args: argparse.Namespace, machine_name: str) -> Identity | None:
    try:
        return find_identity(args.identity, args.out, machine_name)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
