"""Time what a draft view by attention mass costs and saves on one GPU: scores of all pages, the
selection of the best ones, and draft attention over lists of pages for each KV head.

usage: python benchmarks/bench_page_selection.py [--out PATH]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from acceptance.report import Figure, write_json
from attention import kvspec_runs, selection_runs
from attention.shapes import KV_HEADS, MAIN, Shape
from attention.timing import Timing, copy_bandwidth, measure, time_figure
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
SHARE, SHARES = 0.1, (0.05, 0.1, 0.2, 1.0)
SHAPES = (Shape(1, 32768), MAIN, Shape(44, 32768), Shape(11, 131072))
QUERIES = (4, 8)

console = Console(width=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks" / "results" / "page_selection.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    figures = [Figure("copy.tbps", bandwidth / 1e12, "TB/s read plus written")]
    for shape in SHAPES:
        for codec, settings in kvspec_runs.CODECS.items():
            figures += attention_figures(f"{shape}.{codec}", settings, shape)
        figures += selection_figures(shape, bandwidth)
    settings = {
        "geometry": "32 query heads, 8 KV heads, head size 128, page 64, BF16 queries, 32 layers",
        "lists": "as long for every request and KV head, of random pages",
        "baseline": "the same kernel over all pages, from one list for all heads",
        "timing": "median of CUDA graph replays over inputs that rotate past the L2 cache",
        "spread": "half the distance between the outer deciles",
    }
    device = torch.device("cuda")
    write_json(args.out, "page_selection", device, settings, figures, commit=args.commit)
    console.print(f"written: {args.out}")


def attention_figures(name: str, codec: kvspec_runs.CodecSpec, shape: Shape) -> list[Figure]:
    """Time draft attention over shares of the pages, by both back ends at SHARE."""
    every = measure(kvspec_runs.draft_calls(codec, shape))
    figures = [time_figure(f"draft_attention.{name}.all", every)]
    for share in SHARES:
        ours = measure(selection_runs.listed_calls(codec, shape, share))
        figures += _against(f"draft_attention.{name}.listed_{share:g}", every, ours)
    triton = measure(selection_runs.listed_calls(codec, shape, SHARE, "triton"))
    return figures + _against(f"draft_attention.{name}.triton_{SHARE:g}", every, triton)


def selection_figures(shape: Shape, bandwidth: float) -> list[Figure]:
    """Time scores by several numbers of queries, and selection."""
    figures = []
    for codec, settings in kvspec_runs.CODECS.items():
        nbytes = shape.num_pages * KV_HEADS * selection_runs.key_bytes(settings)
        for count in QUERIES:
            selecting = selection_runs.Selecting(settings, shape, count)
            score = measure(selecting.score_calls())
            name = f"score.{shape}.{codec}.{count}_queries"
            share = nbytes / score.median_s / bandwidth
            figures += [
                time_figure(name, score),
                Figure(f"{name}.share_of_copy", share, "of copy bandwidth", None, 1.0),
            ]
            console.print(f"{name}: {score.microseconds:.1f} us, {share:.2f} of the copy")
    select = measure(selecting.select_calls(SHARE))
    layer_us = select.microseconds / selection_runs.LAYERS
    name = f"select.{shape}.us_per_layer"
    console.print(f"{name}: {layer_us:.2f}")
    spread = select.spread_s * 1e6 / selection_runs.LAYERS
    return [*figures, Figure(name, layer_us, "microseconds", spread)]


def _against(name: str, base: Timing, ours: Timing) -> list[Figure]:
    ratio = base.median_s / ours.median_s
    spread = ratio * (base.spread_s / base.median_s + ours.spread_s / ours.median_s)
    console.print(f"{name}: {ours.microseconds:.1f} us, {ratio:.2f}x")
    baseline = round(base.microseconds, 2)
    return [
        time_figure(name, ours),
        Figure(f"{name}.vs_all", ratio, "times as fast", spread, baseline),
    ]


if __name__ == "__main__":
    main()
