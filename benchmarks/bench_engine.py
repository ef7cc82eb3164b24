"""Measure the shape of the engine, and collect its speed against an earlier commit.

    python benchmarks/bench_engine.py --trace TRACE.json \
        --speed NAME=CONTEXT:CONCURRENCY:AFTER.points.jsonl,...:BEFORE.points.jsonl,... [--out ...]

Counted here: import cycles, depth of inheritance and longest file below sglang_kvspec/, and how
many files of tests/plugins another package needs for each seam. --trace: what trace_round.py
--before --after wrote. --speed: points that bench_serving.py measured on one
GPU, one after the other; NAME is that of the figure. Of several records of the point the median
counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from acceptance.report import Figure, write_json
from engine_shape.structure import class_depths, file_lines, plugin_files
from serving import records

from kvspec_testkit.imports import find_cycle, import_graph

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "engine.json"
TRACED = ("engine.round.calls_vs_before", "engine.round.file_changes_vs_before")
SEAMS = {
    "codec": "codecs",
    "drafter": "drafters",
    "view": "draft_views",
    "scheduler": "verify_schedulers",
}
MOST_LINES = 300


def main() -> int:
    args = parse()
    figures = structure_figures()
    raw: dict[str, Any] = {}
    if args.trace is not None:
        trace = json.loads(args.trace.read_text(encoding="utf-8"))
        figures += [Figure(**row) for row in trace["figures"] if row["name"].startswith("engine.")]
        raw["trace"] = {name: trace[name] for name in ("commit", "date", "settings")}
    for given in args.speed:
        name, rest = given.split("=", 1)
        context, concurrency, after, before = rest.split(":")
        point = (int(context), int(concurrency))
        figure, points = speed_figure(name, point, after.split(","), before.split(","))
        figures.append(figure)
        raw[name] = points
    write_json(args.out, "engine", torch.device("cpu"), {"raw": raw}, figures)
    for figure in figures:
        print(f"{figure.name}: {figure.value:g} {figure.unit}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trace", type=Path, help="JSON of trace_round.py --before --after")
    add("--speed", nargs="+", default=[], metavar="NAME=...")
    add("--out", type=Path, default=OUT)
    return parser.parse_args()


def structure_figures() -> list[Figure]:
    package = ROOT / "sglang_kvspec"
    lines = file_lines(package)
    depths = class_depths(package)
    longest, deepest = max(lines, key=lines.get), max(depths, key=depths.get)
    figures = [
        Figure("engine.import_cycles", int(bool(find_cycle(import_graph()))), "1 for any", None, 0),
        Figure("engine.inheritance_depth", depths[deepest], f"classes ({deepest})", None, 1),
        Figure("engine.longest_file", lines[longest], f"lines ({longest})", None, MOST_LINES),
    ]
    for name, group in SEAMS.items():
        files = plugin_files(ROOT / "tests" / "plugins", f"sglang_kvspec.{group}")
        count = max(map(len, files.values()), default=0)
        figures.append(Figure(f"engine.{name}_files", count, "files", None, 1))
    return figures


def speed_figure(
    name: str, point: tuple[int, int], after: Sequence[str], before: Sequence[str]
) -> tuple[Figure, dict[str, Any]]:
    """Return the ratio of tokens a second at (context, concurrency), with the spread of windows
    within the runs."""
    points = {
        side: [
            record
            for path in paths
            for record in records.read(Path(path))
            if (record.context_len, record.concurrency) == point
        ]
        for side, paths in (("after", after), ("before", before))
    }
    rates = {side: median(p.decode_rate.tokens_per_s for p in ps) for side, ps in points.items()}
    ratio = rates["after"] / rates["before"]
    spread = ratio * sum(
        max(p.decode_rate.spread for p in ps) / rates[side] for side, ps in points.items()
    )
    raw = {side: [asdict(record) for record in ps] for side, ps in points.items()}
    return Figure(name, ratio, "x before", spread, 1.0), raw


if __name__ == "__main__":
    sys.exit(main())
