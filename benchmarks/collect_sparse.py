"""Collect the figures of drafts that read a share of the pages into sparse.json.

    python benchmarks/collect_sparse.py --views eval31m_32k=views_eval31m_32k.json \\
        --serving sparse_serving.json smollm2_serving.json --kernels page_selection.json \\
        --identity identity_pages.json --answers lossless_smollm2_exact.json

Each part was written by its own script: bench_views.py, bench_serving.py, bench_page_selection.py,
an identity run, or with --gpu-report by tests/gpu_server. Paths are relative to benchmarks/results.
A figure keeps the spread and the baseline of its part, and `settings.parts` says where, when and at
which commit each part was measured. --commit-of gives the commit of a part that was measured on a
machine without git.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from acceptance.parts import Parts
from acceptance.report import Figure, figure_of, write_json

RESULTS = Path(__file__).resolve().parent / "results"
# Figures of a point that are collected besides its ratio.
RATES = (".decode.tokens_per_s", ".draft_iter_ms", ".accepted", ".drafted")
# Ratio to the same server whose drafts read all pages.
VS_ALL = ".vs_all"
# Times of a layer, and the sizes of the point that they belong to.
SCORE = "sparse.score.16x32768.uniform4.4_queries.us"
SELECT = "sparse.select.16x32768.us_per_layer"
LAYERS, BATCH = 32, 16
KERNELS = ("draft_attention.16x32768.", "score.16x32768.", "select.16x32768.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--views", nargs="+", default=[], metavar="PLACE=FILE")
    parser.add_argument("--kernels", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--serving", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--identity", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--answers", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--commit-of", nargs="*", default=[], metavar="FILE=COMMIT")
    parser.add_argument("--out", type=Path, default=RESULTS / "sparse.json")
    args = parser.parse_args()
    parts = Parts(RESULTS, args.commit_of)
    figures: list[Figure] = []

    for text in args.views:
        place, name = text.split("=")
        figures += views_figures(place, parts.read(name))
    for name in args.kernels:
        figures += renamed(parts.read(name)["figures"], KERNELS)
    for name in args.serving:
        figures += serving_figures(parts.read(name)["figures"])
    for name in args.identity:
        figures += renamed(parts.read(name)["figures"], ("identity.",))
    for name in args.answers:
        result = parts.read(name)
        figures += answers_figures(result["settings"]["model"], result["figures"])
    figures += share_of_round({figure.name: figure.value for figure in figures})
    write_json(args.out, "sparse", torch.device("cpu"), {"parts": parts.sources}, figures)


def views_figures(place: str, result: Mapping[str, Any]) -> list[Figure]:
    """Return acceptance and shares of pages by view, and recall. place: name of the model and the
    context length."""
    figures = []
    for row in result["figures"]:
        head, *middle, last = row["name"].split(".")
        if head == "views":
            view = "_".join(middle)
            what = {"vs_all": "accept", "pages_read": "pages_read", "mass": "mass_read"}
            kind = what.get(last, "mean_accepted")
            end = "vs_all" if last == "vs_all" else ""
            name = ".".join(filter(None, ("sparse", kind, place, view, end)))
            figures.append(figure_of(row, name))
        elif head == "recall":
            figures.append(figure_of(row, f"sparse.recall.{place}.{'_'.join(middle)}.age_{last}"))
    return figures


def serving_figures(rows: Iterable[Mapping[str, Any]]) -> list[Figure]:
    """Return decode rates, and their ratios to plain SGLang in bf16 and to drafts that read all."""
    figures = []
    for row in rows:
        name = row["name"].removeprefix("serve.").replace(".saturation", ".saturated")
        place, _, what = name.partition(".vs_bf16")
        if row["name"].startswith("serve.") and row["name"].endswith(".vs_bf16"):
            figures.append(figure_of(row, f"sparse.{place}{what}"))
        elif row["name"].endswith((*RATES, VS_ALL)):
            figures.append(figure_of(row, f"sparse.{place}"))
    return figures


def answers_figures(model: str, rows: Iterable[Mapping[str, Any]]) -> list[Figure]:
    """Return the answers of a model on a GPU that were compared with drafting off."""
    names = {
        f"lossless.exact.{what}": f"sparse.identity.gpu.{model}.{what}"
        for what in ("answers", "mismatches")
    }
    return [figure_of(row, names[row["name"]]) for row in rows if row["name"] in names]


def share_of_round(values: Mapping[str, float]) -> list[Figure]:
    """Return the share of a round of the exact target that scoring and selection take."""
    place = "sparse.8b.32k.bs16.exact"
    names = (f"{place}.accepted", f"{place}.decode.tokens_per_s", SCORE, SELECT)
    if not all(name in values for name in names):
        return []
    accepted, rate, score_us, select_us = (values[name] for name in names)
    round_us = (accepted + 1) * BATCH / rate * 1e6
    share = LAYERS * (score_us + select_us) / round_us
    return [Figure("sparse.select.share_of_round", share, "share", None, None)]


def renamed(rows: Iterable[Mapping[str, Any]], beginnings: tuple[str, ...]) -> list[Figure]:
    """Return the figures whose names begin so, under `sparse`."""
    chosen = (row for row in rows if row["name"].startswith(beginnings))
    return [figure_of(row, f"sparse.{row['name']}") for row in chosen]


if __name__ == "__main__":
    main()
