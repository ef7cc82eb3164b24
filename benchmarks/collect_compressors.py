"""Collect runs of bench_compressors.py into compressors.json, draw compressors.png, and write what
the package knows of them, sglang_kvspec/planning/measured_compressors.py.

    python benchmarks/collect_compressors.py --runs eval31m_16k=compressors_eval31m_16k.json \\
        eval31m_32k=compressors_eval31m_32k.json smollm2_8k=compressors_smollm2_8k.json

Paths are relative to benchmarks/results. --others: results of other scripts, whose figures named
`compressors.` are taken over. --serving: results of bench_serving.py on one GPU, by the name of
what drafts read. --freed: result of bench_serving.py with plain SGLang and a server that frees
anchors, at one --mem-fraction-static. `settings.parts` says where, when and at which commit each
part was measured; --commit-of gives the commit of a part from a machine without git.

Figures: compressors.PLACE.METHOD.WHAT of each run. compressors.methods: number of scorers and
codecs. compressors.PLACE.best.bytes_vs_dense4: fewest bytes of a method that keeps 0.9 of the
acceptance over all 4-bit anchors; compressors.best.bytes_vs_dense4: of one method for all places,
the most of its bytes. `settings.best` names these methods. compressors.uniform2.accepted,
compressors.rotated2.accepted: all 2-bit anchors of uniform4, and of the better codec that rotates,
at the first place. compressors.serving.POINT.NAME.tokens_per_s, .accepted, .drafted: of a server
with the target exact. .vs_FIRST: tokens a second over those of the first of --serving.
compressors.freed.tokens_vs_plain: tokens that fit on the server of --freed, over those of plain
SGLang in the same memory.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from acceptance.parts import Parts
from acceptance.report import Figure, figure_of, write_json
from compressors.measured import MODULE, source_of
from compressors.plot import draw
from compressors.points import (
    Point,
    accepted_alone,
    cheapest,
    cheapest_everywhere,
    front,
    names_of,
    points_of,
    read_places,
)

RESULTS = Path(__file__).resolve().parent / "results"
PREFIX = "compressors."
RATE = "decode.tokens_per_s"
WHAT_IS_SERVED = {RATE: "tokens_per_s", "accepted": "accepted", "drafted": "drafted"}
SERVED = re.compile(rf"serve\.(.+)\.exact\.({'|'.join(map(re.escape, WHAT_IS_SERVED))})")
FITTING = re.compile(r"serve\.(.+)\.(exact|bf16)\.max_total_num_tokens")
ANCHORS_OF_2_BITS = {
    "uniform2": ("uniform4_2bit",),
    "rotated2": ("rotatekv_2bit", "turboquant_2bit"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", nargs="+", required=True, metavar="PLACE=FILE")
    parser.add_argument("--others", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--serving", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--freed", metavar="FILE", help="serving with freed anchors")
    parser.add_argument("--commit-of", nargs="*", default=[], metavar="FILE=COMMIT")
    parser.add_argument("--out", type=Path, default=RESULTS / "compressors.json")
    parser.add_argument("--module", type=Path, default=MODULE, help="what the package knows of it")
    args = parser.parse_args()
    parts = Parts(RESULTS, args.commit_of)

    runs = {place: parts.read(name) for place, name in (text.split("=") for text in args.runs)}
    points = {place: points_of(run["figures"], PREFIX) for place, run in runs.items()}
    figures, best = summary(points)
    for place, found in points.items():
        figures += place_figures(place, found)
    for name in args.others:
        rows = parts.read(name)["figures"]
        figures += [figure_of(row, row["name"]) for row in rows if row["name"].startswith(PREFIX)]
    servers = dict(text.split("=") for text in args.serving)
    figures += serving_figures(
        {name: parts.read(file)["figures"] for name, file in servers.items()}
    )
    if args.freed is not None:
        figures.append(freed_figure(parts.read(args.freed)["figures"]))
    kept = ("model", "prompt_len", "prompts", "new_tokens", "draft_len", "text", "by", "scorers")
    places = {place: {key: run["settings"][key] for key in kept} for place, run in runs.items()}
    settings = {
        "parts": parts.sources,
        "places": places,
        "best": best,
        "front": {place: [p.method.name for p in front(found)] for place, found in points.items()},
    }
    write_json(args.out, "compressors", torch.device("cpu"), settings, figures)
    titles = read_places(args.out)
    draft_len = next(iter(places.values()))["draft_len"]
    draw(args.out.with_suffix(".png"), titles, draft_len)
    args.module.write_text(source_of(titles, draft_len), encoding="utf-8")


def summary(points: Mapping[str, list[Point]]) -> tuple[list[Figure], dict[str, str]]:
    """Return the figures of all places together, and the names of the best methods, by place and
    for all places. points: of each place."""
    every = [point for found in points.values() for point in found]
    figures = [Figure(f"{PREFIX}methods", len(names_of(every)), "methods")]
    best: dict[str, str] = {}
    everywhere = cheapest_everywhere(points.values())
    if everywhere is not None:
        method, most = everywhere
        best["all"] = method.name
        figures.append(Figure(f"{PREFIX}best.bytes_vs_dense4", most, "x", baseline=1.0))
    for place, found in points.items():
        chosen = cheapest(found)
        if chosen is not None:
            best[place] = chosen.method.name
            name = f"{PREFIX}{place}.best.bytes_vs_dense4"
            figures.append(Figure(name, chosen["bytes_vs_dense4"], "x", baseline=1.0))
    first = next(iter(points.values()))
    for name, labels in ANCHORS_OF_2_BITS.items():
        alone = accepted_alone(first, labels)
        if alone is not None:
            figures.append(figure_of(alone.rows["accepted"], f"{PREFIX}{name}.accepted"))
    return figures, best


def place_figures(place: str, points: list[Point]) -> list[Figure]:
    """Return the figures of one run under the name of its place."""
    return [
        figure_of(row, f"{PREFIX}{place}.{point.method.name}.{what}")
        for point in points
        for what, row in point.rows.items()
    ]


def serving_figures(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Figure]:
    """Return the rates and accepted drafts of servers. results: figures of bench_serving.py by
    name. Rates are compared with those of the first."""
    first = next(iter(results), None)
    bases: dict[str, Mapping[str, Any]] = {}
    figures = []
    for name, rows in results.items():
        for row in rows:
            match = SERVED.fullmatch(row["name"])
            if match is None:
                continue
            point, what = match.groups()
            head = f"{PREFIX}serving.{point}.{name}"
            figures.append(figure_of(row, f"{head}.{WHAT_IS_SERVED[what]}"))
            if what != RATE:
                continue
            if name == first:
                bases[point] = row
            elif point in bases:
                base = bases[point]
                ratio = row["value"] / base["value"]
                spread = ratio * sum(each["spread"] / each["value"] for each in (row, base))
                figures.append(Figure(f"{head}.vs_{first}", ratio, "x", spread, base["value"]))
    return figures


def freed_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return how many times the tokens of plain SGLang fit. rows: figures of bench_serving.py, in
    which all servers of a system have the same memory. Raises ValueError if a system is missing."""
    tokens = {match[2]: row["value"] for row in rows if (match := FITTING.fullmatch(row["name"]))}
    if tokens.keys() != {"exact", "bf16"}:
        raise ValueError(f"--freed needs plain SGLang (bf16) and exact, got {sorted(tokens)}")
    ratio = tokens["exact"] / tokens["bf16"]
    return Figure(f"{PREFIX}freed.tokens_vs_plain", ratio, "x", None, tokens["bf16"])


if __name__ == "__main__":
    main()
