"""Collect what was measured on releases of SGLang, on models, and with Triton, into compat.json.

    python benchmarks/collect_compat.py --releases compat_releases.json \\
        --others releases.json architectures.json --attention attention_triton.json \\
        --answers gpu_tests_triton.json --serving triton_serving.json

Each part was written by its own script: check_compat.py; check_releases.py and
check_architectures.py; and, with --kernels or --kvspec-kernels triton, bench_attention.py,
tests/gpu_server with --gpu-report, and bench_serving.py. Paths are relative to benchmarks/results.
Of several --releases, which must be of one commit, the last counts for each release.
`settings.parts` says where, when and at which commit each part was measured.

Figures: those of --releases, and those of --others named `compat.`. triton.draft.vs_flashinfer and
triton.verifyN.vs_flashinfer (N new tokens a request): 16 requests of 32K tokens of the better
codec, times as fast as FlashInfer on plain KV. triton.identity.answers and .mismatches: answers
compared with drafting off. triton.tests.passed and .failed: each test once, of whatever runs.
triton.serve.POINT.SYSTEM: decode rate over that of plain SGLang.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from acceptance.parts import Parts, answers_figures
from acceptance.report import Figure, figure_of, write_json
from attention.shapes import MAIN
from check_compat import figures_of, outcomes_of

from sglang_kvspec.core.sglang_releases import parse_version

RESULTS = Path(__file__).resolve().parent / "results"
ATTENTION = re.compile(rf"attn\.(draft|verify\d+)\.{MAIN}\.vs_flashinfer_bf16")
SERVING = re.compile(r"serve\.(.+)\.vs_bf16")

Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="+", required=True, metavar="FILE")
    for name in ("others", "attention", "answers", "serving"):
        parser.add_argument(f"--{name}", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--out", type=Path, default=RESULTS / "compat.json")
    args = parser.parse_args()
    parts = Parts(RESULTS, ())

    def rows(names: Iterable[str]) -> list[Row]:
        return [row for name in names for row in parts.read(name)["figures"]]

    try:
        figures = releases_figures([parts.read(name) for name in args.releases])
    except ValueError as error:
        parser.error(str(error))
    figures += [
        figure_of(row, row["name"])
        for row in rows(args.others)
        if row["name"].startswith("compat.")
    ]
    figures += attention_figures(rows(args.attention))
    figures += answers_figures(rows(args.answers), "triton.identity")
    figures += tests_figures(parts.read(name)["settings"]["outcomes"] for name in args.answers)
    figures += serving_figures(rows(args.serving))
    write_json(args.out, "compat", torch.device("cpu"), {"parts": parts.sources}, figures)


def releases_figures(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the figures of all releases. Raises ValueError for results of several commits, of
    several trees with changes, or of different tests."""
    commits = {result["commit"] for result in results}
    if len(commits) > 1:
        raise ValueError(f"--releases are of several commits: {', '.join(sorted(commits))}")
    if len(results) > 1 and any(commit.endswith("-dirty") for commit in commits):
        raise ValueError("--releases are of trees with changes, which may differ: commit them")
    if any(result["settings"]["tests"] != results[0]["settings"]["tests"] for result in results):
        raise ValueError("--releases are of different tests: run all with --all, or none")
    by_release = {each.release: each for result in results for each in outcomes_of(result)}
    ordered = sorted(by_release.values(), key=lambda outcome: parse_version(outcome.release))
    return figures_of(ordered)


def attention_figures(rows: Iterable[Row]) -> list[Figure]:
    """Return how much faster than FlashInfer attention over records is."""
    found = ((row, ATTENTION.fullmatch(row["name"])) for row in rows)
    return [figure_of(row, f"triton.{m[1]}.vs_flashinfer") for row, m in found if m]


def serving_figures(rows: Iterable[Row]) -> list[Figure]:
    """Return the rates of servers, over those of plain SGLang."""
    found = ((row, SERVING.fullmatch(row["name"])) for row in rows)
    return [figure_of(row, f"triton.serve.{m[1]}") for row, m in found if m]


def tests_figures(outcomes: Iterable[Mapping[str, str]]) -> list[Figure]:
    """Return how many tests passed and failed. outcomes: of each run, by test. A test of several
    runs counts once, and as failed if one of them failed."""
    kinds: dict[str, set[str]] = {}
    for run in outcomes:
        for name, outcome in run.items():
            kinds.setdefault(name, set()).add(outcome)
    failed = sum("failed" in found for found in kinds.values())
    passed = sum("passed" in found and "failed" not in found for found in kinds.values())
    return [
        Figure("triton.tests.passed", passed, "tests"),
        Figure("triton.tests.failed", failed, "tests", None, 0),
    ]


if __name__ == "__main__":
    main()
