"""Collect what was measured about packed residuals into exact_residual.json.

    python benchmarks/collect_exact_residual.py --bits exact_residual_bits.json \\
        --kernels packed_exact_kernels.json --fetches fetch_packed_h200.json \\
        --hosted 32b.32k=hosted_32b_raw_serving.json:hosted_32b_packed_serving.json \\
        --transfers ttkt_packed_h200.json \\
        --answers packed_identity.json gpu_tests_packed.json

Each part was written by its own script: bench_exact_residual.py, bench_packed_exact.py,
bench_fetch.py, bench_serving.py, bench_ttkt.py; and tests/sglang/test_packed_residuals_in_full.py
-m identity with --packed-report, or tests/gpu_server -k packed with --gpu-report. Paths are
relative to benchmarks/results. `settings.parts` says where, when and at which commit each part was
measured.

Figures: those of --bits, and those of --kernels under the names encode (packing) and restore
(unpacking). exactres.fetch.WHAT.vs_raw: fetches of packed residuals from host memory over fetches
of raw ones, in pages a second: `alone`, and while drafting; with `by_layer`, layer by layer.
exactres.fetch.WHAT.draft_slowdown: of the draft steps beside packed fetches.
exactres.PLACE.host: tokens a second of a server with packed residuals in host memory, over one with
raw ones (--hosted); .raw, .packed: tokens a second of each.
exactres.ttkt.*, exactres.wire.bytes_vs_full: of a pair of servers, see ttkt/figures.py.
exactres.identity.answers and .mismatches: answers compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from acceptance.parts import Parts, answers_figures
from acceptance.report import Figure, figure_of, write_json

RESULTS = Path(__file__).resolve().parent / "results"
PREFIX = "exactres."
KERNELS = {"exactres.pack.": "exactres.encode.", "exactres.unpack.": "exactres.restore."}
# Ways to fetch, as bench_fetch.py names them, and names of their figures here.
WAYS = {"": "by_page", ".by_layer": "by_layer"}
# Ends the name of a server's rate.
RATE = ".exact.decode.tokens_per_s"

Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("bits", "kernels", "fetches", "transfers", "answers"):
        parser.add_argument(f"--{name}", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--hosted", nargs="*", default=[], metavar="PLACE=RAW:PACKED")
    parser.add_argument("--out", type=Path, default=RESULTS / "exact_residual.json")
    args = parser.parse_args()
    parts = Parts(RESULTS, ())

    def rows(names: Iterable[str]) -> list[Row]:
        return [row for name in names for row in parts.read(name)["figures"]]

    figures = [figure_of(row, row["name"]) for row in rows(args.bits)]
    figures += kernel_figures(rows(args.kernels))
    figures += fetch_figures(rows(args.fetches))
    for text in args.hosted:
        place, _, files = text.partition("=")
        figures += hosted_figures(place, *(rows([name]) for name in files.split(":")))
    figures += [
        figure_of(row, row["name"])
        for row in rows(args.transfers)
        if row["name"].startswith(PREFIX)
    ]
    figures += answers_figures(rows(args.answers), "exactres.identity")
    write_json(args.out, "exact_residual", torch.device("cpu"), {"parts": parts.sources}, figures)


def kernel_figures(rows: Iterable[Row]) -> list[Figure]:
    """Return the speed of packing and unpacking."""
    return [
        figure_of(row, row["name"].replace(name, ours))
        for row in rows
        for name, ours in KERNELS.items()
        if row["name"].startswith(name)
    ]


def fetch_figures(rows: Sequence[Row]) -> list[Figure]:
    """Return the rates of packed fetches over those of raw ones."""
    found = {row["name"].removeprefix("fetch"): row for row in rows}
    figures = []
    for way, name in WAYS.items() if found else ():
        for what, rate in (("alone", "alone_pages_per_s"), ("drafting", "pages_per_s")):
            packed, raw = found[f".packed{way}.{rate}"], found[f"{way}.{rate}"]
            shares = [row["spread"] / row["value"] for row in (packed, raw)]
            ratio = packed["value"] / raw["value"]
            spread = ratio * sum(shares)
            figures.append(
                Figure(f"exactres.fetch.{name}.{what}.vs_raw", ratio, "x", spread, raw["value"])
            )
        row = found[f".packed{way}.draft_slowdown"]
        figures.append(figure_of(row, f"exactres.fetch.{name}.draft_slowdown"))
    return figures


def hosted_figures(place: str, raw: Iterable[Row], packed: Iterable[Row]) -> list[Figure]:
    """Return the rates of two servers, each of which measured one point, and their ratio."""
    ours, theirs = (
        next(row for row in each if row["name"].endswith(RATE)) for each in (packed, raw)
    )
    name, ratio = f"exactres.{place}.host", ours["value"] / theirs["value"]
    spread = ratio * sum(row["spread"] / row["value"] for row in (ours, theirs))
    return [
        Figure(name, ratio, "x raw, tokens/s", spread, theirs["value"]),
        figure_of(theirs, f"{name}.raw"),
        figure_of(ours, f"{name}.packed"),
    ]


if __name__ == "__main__":
    main()
