"""Collect the figures of deterministic inference into lossless.json.

    python benchmarks/collect_lossless.py --serving deterministic_serving.points.jsonl \\
        deterministic_plain_serving.points.jsonl --kernels deterministic_kernels.json \\
        --identity identity_products_h100.json --seeded seeded_cpu.json \\
        --answers lossless_smollm2.json lossless_eval31m.json --tests gpu_tests.json

Each part was written by its own script: bench_serving.py, bench_deterministic.py,
bench_gpu_identity.py and bench_seeded.py, or with --gpu-report by tests/gpu_server. Paths are
relative to benchmarks/results. Answers and tests of several parts are counted together.
`settings.parts` says where, when and at which commit each part was measured. A ratio of servers is
that of the medians of their measurements, which `settings.rates` has in order. It comes from the
first part that has both servers, since other parts ran on other machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from acceptance.report import Figure, figure_of, write_json
from serving import records
from serving.points import label
from serving.records import Record

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "exact-deterministic"
# Pairs of systems to compare, and what the ratio is called.
AGAINST = {
    (OURS, "exact"): "vs_fast.exact",
    ("int8-deterministic", "int8"): "vs_fast.int8",
    (OURS, "bf16"): "vs_plain",
    (OURS, "bf16-deterministic"): "vs_plain_deterministic",
}
# Figures of kernels that are collected.
KERNELS = (".share_of_copy", ".rows_that_differ", ".vs_torch", ".vs_sglang", ".vs_deepgemm")
IDENTITY = "identity.gpu.deterministic."
FAST = "identity.gpu."

# Decode rates in tokens a second, by point and system, in the order of their measurements.
Rates = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serving", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--kernels", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--identity", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--isolated", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--seeded", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--answers", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--out", type=Path, default=RESULTS / "lossless.json")
    args = parser.parse_args()
    parts: dict[str, Any] = {}
    rates: dict[str, Rates] = {}
    figures: dict[str, Figure] = {}

    def add(found: Iterable[Figure]) -> None:
        for figure in found:
            figures.setdefault(figure.name, figure)

    def part(name: str) -> list[Mapping[str, Any]]:
        result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        parts[name] = {key: result[key] for key in ("commit", "date", "machine")}
        return list(result["figures"])

    for name in args.serving:
        measured = records.read(RESULTS / name)
        first = measured[0]
        parts[name] = {"commit": first.commit, "date": first.date, "machine": first.machine}
        rates[name] = rates_of(measured, decode_rate_of)
        with_prefill = [record for record in measured if record.end_to_end is not None]
        rates_with_prefill = rates_of(with_prefill, lambda r: r.end_to_end.output_tokens_per_s)
        add(ratios(rates[name], "decode tokens/s"))
        add(ratios(rates_with_prefill, "output tokens/s", ".with_prefill"))
        add(decode_figures(rates[name]))
        add(start_figures(measured))
    for name in args.identity:
        add(figure_of(row, row["name"].replace(IDENTITY, "lossless.exact.")) for row in part(name))
    for name in args.isolated:
        add(figure_of(row, row["name"].replace(FAST, "lossless.fast.")) for row in part(name))
    for name in args.seeded:
        add(Figure(**row) for row in part(name))
    add(summed([row for name in args.answers for row in part(name)], "lossless."))
    add(summed([row for name in args.tests for row in part(name)], "gpu_tests."))
    for name in args.kernels:
        rows = [row for row in part(name) if row["name"].endswith(KERNELS)]
        add(figure_of(row, f"lossless.{row['name']}") for row in rows)
    settings = {"parts": parts, "rates": rates, "spread": "of rates: half their range"}
    write_json(args.out, "lossless", torch.device("cpu"), settings, list(figures.values()))


def rates_of(measured: Iterable[Record], rate_of: Callable[[Record], float]) -> Rates:
    """Return the rates of a part."""
    rates: Rates = {}
    for record in measured:
        place = label(record.model, record.context_len, record.concurrency)
        rates.setdefault(place, {}).setdefault(record.system, []).append(rate_of(record))
    return rates


def decode_rate_of(record: Record) -> float:
    assert record.decode_rate is not None, f"{record.model} {record.system} has no decode rate"
    return record.decode_rate.tokens_per_s


def ratios(rates: Rates, kind: str, suffix: str = "") -> list[Figure]:
    """Return ratios to other systems, as lossless.vs_plain.32k. kind: what rates they are."""
    figures = []
    for place, systems in rates.items():
        context = place.split(".")[1]
        for (system, other), name in AGAINST.items():
            if system in systems and other in systems:
                ours, base = systems[system], systems[other]
                ratio = median(ours) / median(base)
                spread = ratio * (_spread(ours) / median(ours) + _spread(base) / median(base))
                unit = f"x {other}, {kind}, medians of {len(ours)} and {len(base)}"
                name = f"lossless.{name}.{context}{suffix}"
                figures.append(Figure(name, ratio, unit, spread, median(base)))
    return figures


def decode_figures(rates: Rates) -> list[Figure]:
    """Return the decode rates of a part."""
    return [
        Figure(
            f"lossless.{place}.{system}.decode.tokens_per_s",
            median(values),
            "tokens/s",
            _spread(values),
        )
        for place, systems in rates.items()
        for system, values in systems.items()
    ]


def summed(rows: Iterable[Mapping[str, Any]], prefix: str) -> list[Figure]:
    """Return the sums of the figures whose names begin with `prefix`, by name."""
    sums: dict[str, Figure] = {}
    for row in rows:
        name = row["name"]
        if name.startswith(prefix):
            value = row["value"] + (sums[name].value if name in sums else 0)
            sums[name] = Figure(name, value, row["unit"], None, row["baseline"])
    return list(sums.values())


def start_figures(measured: Iterable[Record]) -> list[Figure]:
    """Return how much longer deterministic servers took from launch to healthy, as the mean over
    targets. A machine's first server reads from a cold disk, so parts that begin with another
    system for each target are fairer."""
    seconds = {record.system: record.start_s for record in measured}
    extra = [
        seconds[system] - seconds[other]
        for (system, other), name in AGAINST.items()
        if name.startswith("vs_fast") and {system, other} <= seconds.keys()
    ]
    if not extra:
        return []
    unit = f"s, mean of {len(extra)} targets"
    value = round(sum(extra) / len(extra), 1)
    return [Figure("lossless.start.extra_seconds", value, unit, _spread(extra))]


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / 2


if __name__ == "__main__":
    main()
