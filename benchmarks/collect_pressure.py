"""Compare speeds with and without residuals in host memory, from points of bench_serving.py.

python benchmarks/collect_pressure.py --resident R.points.jsonl --hosted H.points.jsonl \
    --plain B.points.jsonl --hosted-large L.points.jsonl

One pair is the 8B shape with all residuals in GPU memory (R) and with few of them there (H). Both
have the same number of requests. The other pair is the 32B shape on plain SGLang (B) and with
residuals in host memory (L), each with as many requests as fit. Measure a pair on machines of one
kind. `settings` has the commit, the arguments and the counters of each point, and what its server
reports about the link. With only one pair, the figures of the other pair stay as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from acceptance.report import Figure, write_json
from serving import records
from serving.records import Record

OUT = Path(__file__).parent / "results" / "pressure_h200.json"
HOSTED, RESIDENT, LARGE, PLAIN = "hosted", "resident", "hosted_large", "plain"
PAIRS = ((RESIDENT, HOSTED), (PLAIN, LARGE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in (RESIDENT, HOSTED, PLAIN, LARGE):
        parser.add_argument("--" + name.replace("_", "-"), type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    for pair in PAIRS:
        if len({getattr(args, name) is None for name in pair}) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in pair)
            parser.error(f"{flags} are compared with each other: give both, or neither")
    given = [name for pair in PAIRS for name in pair if getattr(args, name) is not None]
    if not given:
        parser.error("give --resident and --hosted, or --plain and --hosted-large, or all four")
    points = {name: _last(getattr(args, name), parser) for name in given}
    machines = sorted({point.machine for point in points.values()})
    if len(machines) > 1:
        parser.error(f"points of different machines cannot be compared: {', '.join(machines)}")
    last = max(points.values(), key=lambda point: point.date)
    settings = {name: _described(point) for name, point in points.items()}
    figures = figures_of(points)
    if len(points) < len(PAIRS) * 2:
        before = json.loads(args.out.read_text(encoding="utf-8"))
        if before["machine"] != last.machine:
            parser.error(
                f"{args.out} was measured on {before['machine']}, the points on {last.machine}: "
                "give all four flags, or another --out"
            )
        settings = before["settings"] | settings
        known = {figure.name for figure in figures}
        others = [row for row in before["figures"] if row["name"] not in known]
        figures = [*figures, *(Figure(**row) for row in others)]
    write_json(
        args.out,
        "pressure",
        torch.device("cuda"),
        settings,
        figures,
        machine=last.machine,
        commit=last.commit,
        measured_with=last.versions,
    )


def figures_of(points: dict[str, Record]) -> list[Figure]:
    """Return the rate of each point, and the ratio of each pair with the spreads of both."""
    figures = [
        Figure(f"pressure.{name}.tokens_per_s", *_rate(point)) for name, point in points.items()
    ]
    if HOSTED in points:
        pair = points[HOSTED], points[RESIDENT]
        figures.append(_ratio("pressure.vs_resident", "all resident", *pair, 0.8))
    if LARGE in points:
        pair = points[LARGE], points[PLAIN]
        figures.append(_ratio("pressure.32b.32k.vs_bf16", "bf16", *pair, 2.2))
    return figures


def _ratio(name: str, what: str, ours: Record, base: Record, goal: float) -> Figure:
    (rate, _, spread), (base_rate, _, base_spread) = _rate(ours), _rate(base)
    ratio = rate / base_rate
    unit = f"x {what}, decode tokens/s, at {ours.concurrency} against {base.concurrency} requests"
    return Figure(name, ratio, unit, ratio * (spread / rate + base_spread / base_rate), goal)


def _rate(point: Record) -> tuple[float, str, float]:
    rate = point.decode_rate
    assert rate is not None, f"{point.key} has no decode rate"
    return rate.tokens_per_s, "tokens/s", rate.spread or 0.0


def _last(path: Path, parser: argparse.ArgumentParser) -> Record:
    found = [record for record in records.read(path) if record.decode_rate is not None]
    if not found:
        parser.error(f"{path} has no point with a decode rate")
    # Take the longest context, then the most requests, then the newest record.
    return max(found, key=lambda record: (record.context_len, record.concurrency, record.date))


def _described(point: Record) -> dict[str, Any]:
    return {
        "point": f"{point.model}, {point.context_len} tokens, {point.concurrency} requests",
        "system": point.system,
        "commit": point.commit,
        "server_arguments": point.server_arguments,
        "tokens_fit": point.max_total_num_tokens,
        "timing_ms": point.timing,
        "decode_s": None if point.decode is None else point.decode.duration_s,
        "note": point.note,
        "counters": {k: v for k, v in point.counters.items() if isinstance(v, int)},
    }


if __name__ == "__main__":
    main()
