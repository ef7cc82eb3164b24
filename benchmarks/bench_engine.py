"""Measure the structure of the engine, and collect its speed against an earlier commit.

    python benchmarks/bench_engine.py --trace TRACE.json --identity IDENTITY.json \
        --speed NAME=CONTEXT:CONCURRENCY:AFTER.points.jsonl,...:BEFORE.points.jsonl,... [--out ...]

The structure: import cycles, depth of inheritance and longest file below sglang_kvspec/, and how
many files of tests/plugins another package needs for each seam. --trace: output of trace_round.py
--before --after. --identity: output of `make identity`. --speed: points that bench_serving.py
measured on one GPU, one after the other; NAME begins the names of two figures:

- NAME_vs_before: ratio of tokens a second while all requests decode;
- NAME.per_request_vs_before: ratio of the speed of one request, the inverse of its mean time per
  token.

The first counts the tokens that reach the client after every request has its first token and
before any request has its last. A server with paced streams then holds back up to one round of
each request's tokens, so compare servers with the same streaming. The second has no such edge.
Records pair up in the order of measurement. The median of the pairs' ratios counts.
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
LEAST_ANSWERS = 1500


def main() -> int:
    args = parse()
    figures = structure_figures()
    raw: dict[str, Any] = {}
    if args.trace is not None:
        trace = json.loads(args.trace.read_text(encoding="utf-8"))
        figures += [Figure(**row) for row in trace["figures"] if row["name"].startswith("engine.")]
        raw["trace"] = {name: trace[name] for name in ("commit", "date", "settings")}
    if args.identity is not None:
        identity = json.loads(args.identity.read_text(encoding="utf-8"))
        figures += identity_figures(identity)
        raw["identity"] = {name: identity[name] for name in ("commit", "date", "settings")}
    for given in args.speed:
        name, rest = given.split("=", 1)
        context, concurrency, after, before = rest.split(":")
        point = (int(context), int(concurrency))
        found, points = speed_figures(name, point, after.split(","), before.split(","))
        figures += found
        raw[name] = points
    write_json(args.out, "engine", torch.device("cpu"), {"raw": raw}, figures)
    for figure in figures:
        print(f"{figure.name}: {figure.value:g} {figure.unit}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trace", type=Path, help="JSON file of trace_round.py --before --after")
    add("--identity", type=Path, help="JSON file of `make identity`, with all parts merged")
    add("--speed", nargs="+", action="extend", default=[], metavar="NAME=...")
    add("--out", type=Path, default=OUT)
    return parser.parse_args()


def structure_figures() -> list[Figure]:
    package = ROOT / "sglang_kvspec"
    lines = file_lines(package)
    depths = class_depths(package)
    longest, deepest = max(lines, key=lines.get), max(depths, key=depths.get)
    figures = [
        Figure(
            "engine.import_cycles",
            int(bool(find_cycle(import_graph()))),
            "1 if there is a cycle",
            None,
            0,
        ),
        Figure("engine.inheritance_depth", depths[deepest], f"classes ({deepest})", None, 1),
        Figure("engine.longest_file", lines[longest], f"lines ({longest})", None, MOST_LINES),
    ]
    for name, group in SEAMS.items():
        files = plugin_files(ROOT / "tests" / "plugins", f"sglang_kvspec.{group}")
        count = max(map(len, files.values()), default=0)
        figures.append(Figure(f"engine.{name}_files", count, "files", None, 1))
    return figures


def identity_figures(identity: dict[str, Any]) -> list[Figure]:
    """Return how many answers were compared, and how many differ, with their goals. Answers that
    part at a tie of fp32 are counted by themselves."""
    goals = {"answers": LEAST_ANSWERS, "mismatches": 0, "near_ties": None}
    values = {row["name"]: row["value"] for row in identity["figures"]}
    return [
        Figure(f"engine.identity.{name}", values[f"identity.{name}"], "answers", None, goal)
        for name, goal in goals.items()
        if f"identity.{name}" in values
    ]


def speed_figures(
    name: str, point: tuple[int, int], after: Sequence[str], before: Sequence[str]
) -> tuple[list[Figure], dict[str, Any]]:
    """Return both ratios at (context, concurrency), and the records that they come from.

    The spread is half the range of the pairs' ratios. Raises SystemExit if the two sides do not
    pair up.
    """
    sides = [
        [
            record
            for path in paths
            for record in records.read(Path(path))
            if (record.context_len, record.concurrency) == point
        ]
        for paths in (after, before)
    ]
    pairs = list(zip(*sides, strict=False))
    if not pairs or len({len(side) for side in sides}) > 1:
        counts = " and ".join(str(len(side)) for side in sides)
        raise SystemExit(
            f"--speed {name}: after and before need the same number of points, at least 1, at "
            f"context {point[0]} and concurrency {point[1]}; got {counts}"
        )
    ratios = {
        "_vs_before": [
            one.decode_rate.tokens_per_s / other.decode_rate.tokens_per_s for one, other in pairs
        ],
        ".per_request_vs_before": [
            other.decode.tpot_mean_ms / one.decode.tpot_mean_ms for one, other in pairs
        ],
    }
    figures = [
        Figure(name + suffix, median(found), "x before", (max(found) - min(found)) / 2, 1.0)
        for suffix, found in ratios.items()
    ]
    raw = {
        side: [asdict(record) for record in found]
        for side, found in zip(("after", "before"), sides, strict=True)
    }
    return figures, raw


if __name__ == "__main__":
    sys.exit(main())
