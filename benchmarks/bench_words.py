"""Measure what a newcomer meets: words, pages, the wheel, and the demo of a chat model.

    python benchmarks/bench_words.py [--pairs 3] [--fresh] [--out PATH]

--pairs: runs of the chat model on each server; 0 leaves that out. --fresh: clone this commit into
an empty folder, and time `make demo` there, its environment included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from acceptance.report import Figure, write_json
from check_words import ROOT, code_findings, commit_findings, page_findings
from first_use.rates import Run, measure
from rich.console import Console

sys.path.insert(0, str(ROOT / "models"))

import smollm2

console = Console(width=120)


def main() -> int:
    args = parse()
    figures, raw = word_figures()
    figures.append(wheel_figure())
    if args.pairs:
        with tempfile.TemporaryDirectory() as folder:
            runs = measure(smollm2.ensure(), Path(folder), args.pairs, console.print)
        figures += rate_figures(runs)
        raw["runs"] = {name: [asdict(run) for run in each] for name, each in runs.items()}
    if args.fresh:
        found, raw["demo"] = demo_figures()
        figures += found
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write_json(args.out, "words", torch.device("cpu"), settings | {"raw": raw}, figures)
    for figure in figures:
        console.print(f"{figure.name}: {figure.value:g} {figure.unit}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pairs", type=int, default=3, help="runs of the chat model on each server")
    add("--fresh", action="store_true", help="time `make demo` in a fresh clone")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "words.json")
    return parser.parse_args()


def word_figures() -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures of the language check and of the documentation, with the findings."""
    findings = [*page_findings(), *commit_findings(), *code_findings()]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = list((ROOT / "docs").rglob("*.md"))
    with tempfile.TemporaryDirectory() as site:
        command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", site]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    warnings = [line for line in built.stderr.splitlines() if line.startswith(("WARN", "ERROR"))]
    assert not built.returncode or warnings, built.stderr
    figures = [
        Figure("words.findings", len(findings), "findings", baseline=0),
        Figure("words.readme_lines", len(readme.splitlines()), "lines", baseline=150),
        Figure("words.docs_pages", len(pages), "pages", baseline=25),
        Figure("words.docs_warnings", len(warnings), "warnings", baseline=0),
    ]
    return figures, {"findings": [str(finding) for finding in findings], "warnings": warnings}


def wheel_figure() -> Figure:
    """Build the wheel of this commit and return its size. A clone has no files of other builds."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        subprocess.run([*build, "--outdir", folder, str(clone)], check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        return Figure("wheel.mib", wheel.stat().st_size / 2**20, "MiB")


def rate_figures(runs: dict[str, list[Run]]) -> list[Figure]:
    """Return the median ratio to plain SGLang of each schedule, over runs that followed each
    other. Spread: half of what lies between the least and the largest."""
    figures = []
    for name in ("rounds", "staggered"):
        ratios = [a.rate / b.rate for a, b in zip(runs[name], runs["plain"], strict=True)]
        spread = (max(ratios) - min(ratios)) / 2
        figure = "demo.rate_vs_plain" if name == "rounds" else f"demo.rate_vs_plain.{name}"
        figures.append(Figure(figure, median(ratios), "x plain SGLang", spread, baseline=0.6))
    return figures


def demo_figures() -> tuple[list[Figure], dict[str, Any]]:
    """Run `make demo` in a fresh clone. Raises FileNotFoundError if it ends without a report."""
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        began = time.perf_counter()
        # The demo writes its report before it ends with 1 where texts differ.
        subprocess.run(["make", "demo"], cwd=clone, check=False)
        seconds = time.perf_counter() - began
        report = json.loads((clone / ".kvspec" / "demo" / "report.json").read_text("utf-8"))
    equal = Counter(position is None for position in report["differences"].values())
    figures = [
        Figure("demo.seconds_fresh", seconds, "s", baseline=300),
        Figure("demo.differences", equal[False], f"of {sum(equal.values())} outputs", baseline=0),
    ]
    return figures, report


if __name__ == "__main__":
    sys.exit(main())
