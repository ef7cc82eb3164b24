"""Command line of bench_serving.py."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from serving.curve import Traces
from serving.identity import NAME
from serving.points import MAX_CONCURRENCY, parse_points
from serving.systems import READS_ALL, SYSTEMS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PASSES = {
    "decode": ("decode",),
    "end-to-end": ("end_to_end",),
    "both": ("end_to_end", "decode"),
}


def parse_arguments(description: str) -> argparse.Namespace:
    """Return the arguments with `points` parsed. Exits if they make no sense."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--points", nargs="+", default=[], metavar="MODEL:CONTEXT:CONCURRENCY[,...]",
        help="points to measure; `max`: as many requests as fit, up to --max-running")  # fmt: skip
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--measure", choices=PASSES, default="decode", help="passes to run (default: decode)")
    add("--output-len", type=int, default=512, help="tokens of each answer (default: 512)")
    add("--waves", type=int, default=1,
        help="prompts per slot in the end-to-end pass (default: 1)")  # fmt: skip
    add("--repeat", type=int, default=1, metavar="N", help="measure each point N times in a row on "
        "one server; --out has the median, OUT.points.jsonl keeps all")  # fmt: skip
    add("--max-running", type=int, help="most running requests of each server (default: the "
        "highest concurrency of --points)")  # fmt: skip
    add_server_options(parser)
    add("--time-limit", type=float, default=540,
        help="seconds after which the last server is stopped (default: 540)")  # fmt: skip
    add("--out", type=Path, default=RESULTS / "serving_h200.json")
    add("--identity", type=Path, metavar="RESULT.json", help="result of bench_gpu_identity.py to "
        f"copy into --out (default: {NAME} in the folder of --out, if it exists)")  # fmt: skip
    add("--merge", type=Path, nargs="+", default=[], metavar="POINTS.jsonl",
        help="write --out from the points of earlier runs; measure nothing")  # fmt: skip
    add("--consecutive", action="store_true", help="treat the runs of --merge as consecutive on "
        "one machine: only the first server of all had a cold start")  # fmt: skip
    args = parser.parse_args()
    try:
        args.points = parse_points(args.points)
    except ValueError as error:
        parser.error(str(error))
    if args.replay:
        args.points = [
            replace(point, model=replace(point.model, name=f"{point.model.name}-replayed"))
            if not point.model.dummy
            else point
            for point in args.points
        ]
    if args.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {args.repeat}")
    args.points = [point for point in args.points for _ in range(args.repeat)]
    if not args.points and not args.merge:
        parser.error("give --points to measure, or --merge with the points of earlier runs")
    if args.consecutive and not args.merge:
        parser.error("--consecutive needs --merge")
    unbounded = any(point.concurrency == MAX_CONCURRENCY for point in args.points)
    if unbounded and not args.max_running:
        parser.error("--points with the concurrency max needs --max-running")
    if (reason := untraced(args)) is not None:
        parser.error(reason)
    return args


def untraced(args: argparse.Namespace) -> str | None:
    """Return why --traces may not tell of a draft that a server makes, None if they do. The server
    would fail in its first round."""
    chooses = [name for name in args.systems if SYSTEMS[name].target and READS_ALL not in name]
    is_named = "--kvspec-draft-budget" in args.kvspec_args
    if not args.points or args.traces is None or is_named or not chooses:
        return None
    missing = args.traces.unrecorded_budgets()
    if not missing:
        return None
    return (
        f"{args.traces.path} has no traces at the draft budgets {', '.join(map(str, missing))}, "
        f"which {chooses[0]} may choose: name one with --kvspec-args=--kvspec-draft-budget=0.1"
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on servers that all benchmarks of serving share."""
    add = parser.add_argument
    add("--replay", action="store_true", help="replay acceptance on a model with weights, too")
    add("--codec", choices=("log4", "uniform4"), default="uniform4")
    add("--curve", type=Path, default=RESULTS / "acceptance.json", help="acceptance to replay")
    add("--traces", type=Traces.of, metavar="RESULT[:SCORER]", help="traces to replay, at the "
        "context length of the points: of views, from bench_views.py, or of a scorer over 4-bit "
        "anchors, from bench_compressors.py (default: replay --curve)")  # fmt: skip
    add("--server-args", default="", metavar="'ARGS'",
        help="further flags of every server; they override the benchmark's flags")  # fmt: skip
    add("--kvspec-args", default="", metavar="'ARGS'",
        help="further flags of the servers with --kvspec")  # fmt: skip
    add("--commit", default="", help="commit to record (default: what git reports)")
    add("--logs", type=Path, default=ROOT / ".kvspec" / "bench_serving",
        help="folder for the servers' logs")  # fmt: skip
