"""Command line of bench_serving.py."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from serving.identity import NAME
from serving.points import MAX_CONCURRENCY, parse_points
from serving.systems import SYSTEMS

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
        help="`max` is as many requests as fit, up to --max-running")  # fmt: skip
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--measure", choices=PASSES, default="decode", help="(default: decode)")
    add("--output-len", type=int, default=512, help="tokens an answer (default: 512)")
    add("--waves", type=int, default=1, help="prompts a slot, end to end (default: 1)")
    add("--repeat", type=int, default=1, metavar="N", help="measure each point N times, one after "
        "the other, on the same server; --out keeps the last, OUT.points.jsonl all")  # fmt: skip
    add("--max-running", type=int, help="the servers' limit (default: the most of --points)")
    add_server_options(parser)
    add("--time-limit", type=float, default=540,
        help="seconds until the last server is told to stop (default: 540)")  # fmt: skip
    add("--out", type=Path, default=RESULTS / "serving_h200.json")
    add("--identity", type=Path, metavar="RESULT.json", help="of bench_gpu_identity.py, whose "
        f"figures are copied into --out (default: {NAME} beside it, if it exists)")  # fmt: skip
    add("--merge", type=Path, nargs="+", default=[], metavar="POINTS.jsonl",
        help="measure nothing; write --out from the points of earlier runs")  # fmt: skip
    add("--consecutive", action="store_true", help="the runs of --merge followed one another on "
        "one machine, so that only the first server of all had a cold start")  # fmt: skip
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
        parser.error("--repeat is at least 1")
    args.points = [point for point in args.points for _ in range(args.repeat)]
    if not args.points and not args.merge:
        parser.error("say what to measure with --points, or what to --merge")
    if args.consecutive and not args.merge:
        parser.error("--consecutive is about the runs of --merge")
    unbounded = any(point.concurrency == MAX_CONCURRENCY for point in args.points)
    if unbounded and not args.max_running:
        parser.error("a concurrency of max needs --max-running")
    return args


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on servers that all benchmarks of serving share."""
    add = parser.add_argument
    add("--replay", action="store_true", help="replay acceptance on a model with weights, too")
    add("--codec", choices=("log4", "uniform4"), default="uniform4")
    add("--curve", type=Path, default=RESULTS / "acceptance.json", help="what is replayed")
    add("--server-args", default="", metavar="'ARGS'", help="for every server, wins over ours")
    add("--kvspec-args", default="", metavar="'ARGS'", help="for the servers with --kvspec")
    add("--commit", default="", help="of this checkout, where git cannot say")
    add("--logs", type=Path, default=ROOT / ".kvspec" / "bench_serving", help="servers' logs")
