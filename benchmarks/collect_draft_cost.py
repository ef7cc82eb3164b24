"""Collect the figures of cheap drafts into draft_cost.json.

    python benchmarks/collect_draft_cost.py --products int4_products.json \\
        --acceptance eval31m_16k=views_eval31m_16k_w4.json:views_eval31m_16k.json \\
        --serving w4_serving.json --saturated w4_saturated_serving.json \\
        --ngram ngram_gpu.json --answers gpu_tests_int4_weights.json

Each part was written by its own script: bench_int4_products.py, bench_views.py, bench_serving.py,
bench_ngram_gpu.py, or with --gpu-report by tests/gpu_server. Paths are relative to
benchmarks/results. --acceptance names a place and two parts: drafts with weights in 4 bits, and
with the model's own. w4.accept.vs_target_weights is that of the first place, with drafts that read
all pages. Servers with and without copies may be of several parts, which must be of one commit and
one machine. Parts of --saturated ran as many requests as fit, those of --serving did not. Answers
of several parts are counted together.
`settings.parts` says where, when and at which commit each part was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from acceptance.parts import answers_figures
from acceptance.report import Figure, figure_of, write_json
from serving.systems import BASELINE, INT4_WEIGHTS

RESULTS = Path(__file__).resolve().parent / "results"
SERVE = "serve."
VS_BASELINE = f".vs_{BASELINE}"
# Figures of a system at a point that are collected besides its ratio.
OF_SYSTEM = (".decode.tokens_per_s", ".draft_iter_ms", ".accepted", ".drafted")
START = ".start_seconds"
SATURATION = ".saturation."
ACCEPTED = ".mean_of_16"
VS_TARGET_WEIGHTS = ".vs_target_weights"
MAIN_ACCEPTANCE = "w4.accept.vs_target_weights"

Rows = Sequence[Mapping[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--products", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--acceptance", nargs="*", default=[], metavar="PLACE=4_BITS:OWN")
    parser.add_argument("--serving", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--saturated", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--ngram", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--answers", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--out", type=Path, default=RESULTS / "draft_cost.json")
    args = parser.parse_args()
    figures: list[Figure] = []
    parts: dict[str, Any] = {}

    def part(name: str) -> Rows:
        result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        parts[name] = {key: result[key] for key in ("commit", "date", "machine")}
        return [{**row, "commit": result["commit"]} for row in result["figures"]]

    for name in args.products:
        figures += [figure_of(row, row["name"]) for row in part(name)]
    for text in args.acceptance:
        place, _, files = text.partition("=")
        copies, own = files.split(":")
        found = acceptance_figures(place, part(copies), part(own))
        ratios = {figure.name: figure for figure in found}
        main = ratios.get(f"w4.accept.{place}.all{VS_TARGET_WEIGHTS}")
        if main is not None and all(figure.name != MAIN_ACCEPTANCE for figure in figures):
            figures.append(replace(main, name=MAIN_ACCEPTANCE))
        figures += found
    for names, is_saturated in ((args.serving, False), (args.saturated, True)):
        rows = [row for name in names for row in part(name)]
        figures += serving_figures(
            row for row in rows if (SATURATION in row["name"]) == is_saturated
        )
    for name in args.ngram:
        figures += [figure_of(row, row["name"]) for row in part(name)]
    rows = (row for name in args.answers for row in part(name))
    figures += answers_figures(rows, "draft_cost.identity")
    write_json(args.out, "draft_cost", torch.device("cpu"), {"parts": parts}, figures)


def acceptance_figures(place: str, copies: Rows, own: Rows) -> list[Figure]:
    """Return the accepted drafts of each view of both parts with weights in 4 bits, and their ratio
    to those with the model's own weights. place: name of the model and the context length."""
    accepted = {row["name"]: row for row in own}
    figures = []
    for row in copies:
        if row["name"].endswith(ACCEPTED) and row["name"] in accepted:
            view = row["name"].removesuffix(ACCEPTED).removeprefix("views.")
            name = f"w4.accept.{place}.{view}"
            base = accepted[row["name"]]["value"]
            ratio = Figure(f"{name}{VS_TARGET_WEIGHTS}", row["value"] / base, "x", None, base)
            figures += [figure_of(row, f"{name}{ACCEPTED}"), ratio]
    return figures


def serving_figures(rows: Iterable[Mapping[str, Any]]) -> list[Figure]:
    """Return what servers that draft in 4 bits reach, against plain SGLang and against the same
    target whose drafts read the model's own weights, and how much longer they take to start. Rows
    of different commits are not compared. Of figures of one name, the last part's counts."""
    values = {
        (row["commit"], row["name"].removeprefix(SERVE)): row
        for row in rows
        if row["name"].startswith(SERVE)
    }
    figures = []
    extra = []
    for (commit, name), row in values.items():
        place, mark, rest = name.rpartition(INT4_WEIGHTS)
        if not mark:
            continue
        if rest == VS_BASELINE:
            figures.append(figure_of(row, f"cheap.{place.replace('.saturation', '.saturated')}"))
        elif rest in OF_SYSTEM:
            figures.append(figure_of(row, f"cheap.{place}{rest}"))
        same = values.get((commit, place + rest))
        if same is not None and rest == OF_SYSTEM[0]:
            figures.append(_ratio(f"cheap.{place}{VS_TARGET_WEIGHTS}", row, same))
        elif same is not None and rest == START:
            extra.append(row["value"] - same["value"])
    if extra:
        unit = f"s, median of {len(extra)} points"
        spread = (max(extra) - min(extra)) / 2
        figures.append(Figure("start.extra_seconds.w4", median(extra), unit, spread))
    return list({figure.name: figure for figure in figures}.values())


def _ratio(name: str, row: Mapping[str, Any], base: Mapping[str, Any]) -> Figure:
    """Return the ratio of two rates. Squares of their relative half widths add up."""
    value = row["value"] / base["value"]
    shares = [each["spread"] / each["value"] for each in (row, base) if each["spread"] is not None]
    spread = value * sum(share**2 for share in shares) ** 0.5 if len(shares) == 2 else None
    return Figure(name, value, "x the same target without copies, tokens/s", spread, base["value"])


if __name__ == "__main__":
    main()
