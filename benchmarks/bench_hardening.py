"""Fuzz servers with generated requests, time their streams, and time the refusal of wrong flags.

    python benchmarks/bench_hardening.py [--requests 10000] [--pairs 5] [--out ...]

Everything runs on the CPU, one part after the other. Fuzzing sends generated requests to demo-5m
servers of several settings, to a prefill server, to a decode server and to their door. Valid
requests run beside them. A prefix server gets hostile messages. Streams: four answers of
SmolLM2-135M at once, in turn from plain SGLang and from KVSpec with --kvspec-stream burst and
paced. Refusals: a wrong flag on the real command line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from acceptance.report import Figure, write_json
from first_use.turns import run_in_turn
from hardening import fuzzer, refusals
from hardening.streams import StreamRun, run_streams
from hardening.targets import (
    START_TIMEOUT_S,
    VARIANTS,
    VOCAB_SIZE,
    attack_prefix_server,
    pair,
    single,
)
from rich.console import Console

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent / "models"))

import smollm2  # noqa: E402 - a script of the models folder, which is no package

STREAMS = {
    "plain": (),
    "burst": ("--kvspec", "--kvspec-stream=burst"),
    "paced": ("--kvspec", "--kvspec-stream=paced"),
}
# Three servers share the memory. All have pools of the same size, with room for all streams.
STREAM_ARGUMENTS = (
    "--disable-radix-cache",
    "--max-total-tokens=8192",
    "--max-running-requests=4",
)
TAIL = 0.99

console = Console(width=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--requests", type=int, default=10_000, help="generated requests to single servers")
    add(
        "--role-requests",
        type=int,
        default=500,
        help="generated requests to each of prefill, decode and door",
    )
    add("--messages", type=int, default=2000, help="hostile messages to the prefix server")
    add(
        "--pairs", type=int, default=5, help="runs of the four streams on each server; 0 skips them"
    )
    add("--tokens", type=int, default=256, help="tokens of each stream")
    add("--refusals", type=int, default=5, help="number of starts with a wrong flag")
    add("--seed", type=int, default=0)
    add("--streams-only", action="store_true", help="measure only the streams")
    add("--out", type=Path, default=ROOT / "results" / "hardening.json")
    return parser.parse_args()


def main() -> int:
    """Run all parts. Return 1 if fuzzing found something, so that `make fuzz` fails."""
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # Refusals come first: they time imports, whose files later parts would leave in memory.
        if args.streams_only:
            refused_s, http, roles = [], {}, {}
        else:
            refused_s = refusals.measure(args.refusals)
            console.print(f"a wrong flag is refused after {min(refused_s):.1f} s at the earliest")
            http = fuzz_singles(args, folder)
            roles = fuzz_roles(args, folder)
        streams = measure_streams(args, folder) if args.pairs else {}
    figures = [
        *(http_figures(http) if http else ()),
        *(role_figures(roles) if roles else ()),
        *(stream_figures(streams) if streams else ()),
        *([median_figure("refusals.seconds", refused_s, "s")] if refused_s else ()),
    ]
    raw = {
        "http": {name: _counts(result) for name, result in http.items()},
        "roles": roles,
        "streams": {name: [asdict(run) for run in runs] for name, runs in streams.items()},
        "refusals_s": refused_s,
    }
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write_json(args.out, "hardening", torch.device("cpu"), settings | {"raw": raw}, figures)
    for figure in figures:
        console.print(f"{figure.name}: {figure.value:g} {figure.unit}")
    is_clean = all(result.is_clean for result in http.values()) and not any(
        role["findings"] for role in roles.values()
    )
    return 0 if is_clean else 1


def fuzz_singles(args: argparse.Namespace, folder: Path) -> dict[str, fuzzer.FuzzResult]:
    """Attack one server of each setting in turn."""
    results = {}
    for number, variant in enumerate(VARIANTS):
        with single(variant, folder) as target:
            count = round(args.requests * variant.share)
            results[variant.name] = fuzzer.run(target, VOCAB_SIZE, count, args.seed + number)
        _announce(variant.name, results[variant.name])
    return results


def fuzz_roles(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Attack a prefill server, a decode server, their door, and a prefix server."""
    roles: dict[str, dict[str, Any]] = {}
    with pair(folder) as targets:
        for number, (role, target) in enumerate(targets.items()):
            result = fuzzer.run(target, VOCAB_SIZE, args.role_requests, args.seed + 100 + number)
            _announce(role, result)
            roles[role] = _counts(result)
    found = attack_prefix_server(folder, args.messages, args.seed)
    console.print(f"prefix server: {args.messages} messages, {len(found)} findings", *found)
    roles["prefix server"] = {"requests": args.messages, "findings": found}
    return roles


def measure_streams(args: argparse.Namespace, folder: Path) -> dict[str, list[StreamRun]]:
    """Stream from all three servers in turn, after one warm-up run on each."""

    def check(name: str, number: int, run: StreamRun, plain: StreamRun) -> None:
        console.print(
            f"{name} {number}: {run.rate:.1f} tokens/s, {run.num_chunks} chunks, gaps "
            f"p50 {run.quantile(0.5):.3f} p99 {run.quantile(TAIL):.3f} s"
        )
        assert run.texts == plain.texts, f"{name}: the texts differ from those of plain SGLang"

    return run_in_turn(
        STREAMS,
        (*STREAM_ARGUMENTS, f"--model-path={smollm2.ensure()}"),
        folder / "streams",
        args.pairs,
        warm_up=lambda url: run_streams(url, 8),
        run=lambda url: run_streams(url, args.tokens),
        check=check,
        start_timeout_s=START_TIMEOUT_S,
    )


def http_figures(results: dict[str, fuzzer.FuzzResult]) -> list[Figure]:
    def total(kind: str) -> int:
        return sum(len(getattr(result, kind)) for result in results.values())

    requests = sum(result.requests for result in results.values())
    answered = sum(result.statuses.get(200, 0) for result in results.values())
    return [
        Figure("fuzz.http.requests", requests, "requests"),
        Figure("fuzz.http.answered", answered, "requests"),
        Figure("fuzz.http.crashes", total("crashes"), "findings"),
        Figure("fuzz.http.errors", total("errors"), "findings"),
        Figure("fuzz.http.neighbours_changed", total("neighbours_changed"), "findings"),
        Figure("fuzz.http.leaks", total("leaks"), "findings"),
        Figure("fuzz.http.tracebacks", total("tracebacks"), "findings"),
    ]


def role_figures(roles: dict[str, dict[str, Any]]) -> list[Figure]:
    clean = [role for role, result in roles.items() if not result["findings"]]
    return [
        Figure("fuzz.roles", len(clean), "roles without a finding", baseline=len(roles)),
        Figure("fuzz.roles.requests", sum(each["requests"] for each in roles.values()), "requests"),
    ]


def stream_figures(runs: dict[str, list[StreamRun]]) -> list[Figure]:
    """Return medians: of ratios between runs that followed each other, of p99 gaps, and of chunk
    counts."""
    figures = []
    for name in ("paced", "burst"):
        pairs = list(zip(runs[name], runs["plain"], strict=True))
        tails = [run.quantile(TAIL) / plain.quantile(TAIL) for run, plain in pairs]
        rates = [run.rate / plain.rate for run, plain in pairs]
        figures.append(median_figure(f"stream.p99_itl_vs_plain.{name}", tails, "x plain"))
        figures.append(median_figure(f"stream.rate_vs_plain.{name}", rates, "x plain"))
    rates = [
        paced.rate / burst.rate for paced, burst in zip(runs["paced"], runs["burst"], strict=True)
    ]
    figures.append(median_figure("stream.rate.paced_vs_burst", rates, "x burst"))
    for name, each in runs.items():
        tails = [run.quantile(TAIL) for run in each]
        figures.append(median_figure(f"stream.p99_itl.{name}", tails, "s"))
        figures.append(
            median_figure(f"stream.chunks.{name}", [run.num_chunks for run in each], "chunks")
        )
    return figures


def median_figure(name: str, values: Sequence[float], unit: str) -> Figure:
    """Return the median, with half the range of the values as spread."""
    return Figure(name, statistics.median(values), unit, (max(values) - min(values)) / 2)


def _counts(result: fuzzer.FuzzResult) -> dict[str, Any]:
    statuses = {str(status): count for status, count in sorted(result.statuses.items())}
    return {
        "requests": result.requests,
        "batches": result.batches,
        "statuses": statuses,
        "findings": result.findings(),
    }


def _announce(name: str, result: fuzzer.FuzzResult) -> None:
    statuses = ", ".join(f"{count} x {code}" for code, count in sorted(result.statuses.items()))
    console.print(f"{name}: {result.requests} requests ({statuses})")
    for finding in result.findings():
        console.print(finding, markup=False)


if __name__ == "__main__":
    sys.exit(main())
