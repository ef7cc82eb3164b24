"""Time the attention mass of pages in two ways on one GPU: scores of all anchors after a
verification, as the server computes them, and as a by-product of the int8 target's verification.

usage: python benchmarks/bench_verification_mass.py [--out PATH]

by_product: verification that leaves the mass, less verification as it is. The four candidates of a
shape alternate.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from acceptance.report import Figure, write_json
from attention.kvspec_runs import CODECS
from attention.mass_runs import Verifying
from attention.selection_runs import LAYERS, Selecting
from attention.shapes import MAIN, Shape
from attention.timing import Timing, measure_in_turn, time_figure
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
SHAPES = (Shape(1, 32768), MAIN, Shape(44, 32768))
# Tokens that are verified for each request, of which the last ones score pages.
NUM_NEW, QUERIES = 13, 4
# Largest difference of two log-sum-exps, to base 2. Probabilities are fp16: each is off by 2^-11 at
# most, and so are the sums.
MOST_ERROR = 2 / 2048

console = Console(width=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks" / "results" / "verification_mass.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    args = parser.parse_args()
    torch.manual_seed(0)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            for codec in CODECS:
                figures += figures_of(codec, shape, Path(folder))
                torch.cuda.empty_cache()
    settings = {
        "geometry": "32 query heads, 8 KV heads, head size 128, page 64, BF16 queries",
        "rows": f"{NUM_NEW} tokens are verified, the last {QUERIES} score pages",
        "timing": "median of CUDA graph replays over inputs that rotate past the L2 cache; "
        "candidates alternate",
        "spread": "half the distance between the outer deciles",
        "baseline": "microseconds of verification as it is",
    }
    device = torch.device("cuda")
    write_json(args.out, "verification_mass", device, settings, figures, commit=args.commit)
    console.print(f"written: {args.out}")


def figures_of(codec: str, shape: Shape, folder: Path) -> list[Figure]:
    verifying = Verifying(CODECS[codec], shape, NUM_NEW, QUERIES, folder)
    error = verifying.largest_error()
    if not error <= MOST_ERROR:
        raise ValueError(f"{shape} {codec}: log-sum-exps of pages are off by {error:.2g}")
    times = measure_in_turn(
        {
            "verify": verifying.calls(verifying.kernel),
            "verify_with_rows": verifying.calls(verifying.changed),
            "verify_with_mass": verifying.calls_with_mass(),
            "scores": Selecting(CODECS[codec], shape, QUERIES).score_calls(),
        }
    )
    base = times["verify"]
    more = Timing(
        times["verify_with_mass"].median_s - base.median_s,
        times["verify_with_mass"].spread_s + base.spread_s,
    )
    name = f"verification_mass.{shape}.{codec}"
    text = ", ".join(f"{each} {timing.microseconds:.1f}" for each, timing in times.items())
    console.print(f"{name}: {text} us; by-product {more.microseconds:.1f} us, error {error:.1g}")
    saved = (times["scores"].median_s - more.median_s) * LAYERS * 1e3
    spread = (times["scores"].spread_s + more.spread_s) * LAYERS * 1e3
    # Which tokens are accepted is known past the last layer, so rows of all layers wait for it.
    rows_gb = verifying.page_lse.nbytes * LAYERS / 1e9
    return [
        *(time_figure(f"{name}.{each}", timing) for each, timing in times.items()),
        time_figure(f"{name}.by_product", more),
        Figure(f"{name}.saved_ms_per_round", saved, "milliseconds in 32 layers", spread),
        Figure(f"{name}.rows_gb", rows_gb, "GB in 32 layers"),
    ]


if __name__ == "__main__":
    main()
