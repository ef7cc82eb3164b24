"""Time what deterministic inference computes with on one GPU: products whose rows do not depend on
the number of rows, and attention in one order. Compare the bits of batches and of single requests.

usage: python benchmarks/bench_deterministic.py [--out PATH]

products: the four weights of a layer of the 8B shape, by rows; against torch.mm, which splits sums
by the number of rows, and against what SGLang uses instead: its Triton kernel, and DeepGEMM where
it is installed. Also every tile by itself.
attention: 16 requests of 32768 tokens, against the copy bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from acceptance.report import Figure, write_json
from attention.deterministic_runs import DeterministicRuns
from attention.shapes import MAIN, WEIGHTS
from attention.timing import Timing, copy_bandwidth, measure, time_figure
from rich.console import Console
from sglang.srt.batch_invariant_ops import batch_invariant_ops

from kvspec_kernels.ops import products

ROOT = Path(__file__).resolve().parents[1]
# One step of one request and of 16; verifications of 8 and 16 requests; parts of prompts.
ROWS = (1, 16, 64, 104, 208, 336, 1024, 8192)
COPIES = 4
# Queries of each request: a step, and verifications.
QUERIES = (1, 13, 16, 21)

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Ways to multiply [M, K] rows by an [N, K] weight.
SYSTEMS: dict[str, Product] = {
    "product": products.product,
    "torch": lambda rows, weight: rows @ weight.t(),
    "sglang": lambda rows, weight: batch_invariant_ops._matmul_persistent_triton(rows, weight.t()),
}
if batch_invariant_ops.ENABLE_JIT_DEEPGEMM:
    SYSTEMS["deepgemm"] = lambda rows, weight: batch_invariant_ops._matmul_persistent_deepgemm(
        rows, weight.t()
    )

console = Console(width=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks" / "results" / "deterministic_kernels.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    args = parser.parse_args()
    torch.manual_seed(0)
    figures = [*attention_figures(), *product_figures()]
    settings = {
        "geometry": "8B shape: 32 query heads, 8 KV heads, head size 128, page 64, BF16",
        "weights": {name: list(shape) for name, shape in WEIGHTS.items()},
        "timing": "median of CUDA graph replays; weights rotate past the L2 cache",
        "spread": "half the distance between the outer deciles",
        "baseline": "torch.mm; for attention the copy bandwidth",
    }
    device = torch.device("cuda")
    write_json(args.out, "deterministic_kernels", device, settings, figures, commit=args.commit)
    console.print(f"written: {args.out}")


def attention_figures() -> Iterator[Figure]:
    """Time attention by the queries of a request, and count rows whose bits depend on the batch."""
    bandwidth = copy_bandwidth()
    yield Figure("copy.tbps", bandwidth / 1e12, "TB/s read plus written")
    runs = DeterministicRuns(MAIN)
    whole = runs.call(max(QUERIES))().clone()
    for num_new in QUERIES:
        ours = measure([runs.call(num_new)])
        share = runs.nbytes() / ours.median_s / bandwidth
        alone = runs.call(num_new, batch=1)()
        expected = whole[:, -num_new:]
        differ = _rows_that_differ(runs.call(num_new)(), expected)
        differ += _rows_that_differ(alone, expected[:1])
        name = f"attention.{MAIN}.{num_new}_queries"
        console.print(f"{name}: {ours.microseconds:.0f} us, {share:.2f} of the copy, {differ=}")
        yield time_figure(name, ours)
        yield Figure(f"{name}.share_of_copy", share, "of copy bandwidth", None, 1.0)
        yield Figure(f"{name}.rows_that_differ", differ, "rows", None, 0.0)


def product_figures() -> Iterator[Figure]:
    """Time products by rows, by weight and for a whole layer."""
    layers: dict[tuple[int, str], list[Timing]] = {}
    for name, (columns, depth) in WEIGHTS.items():
        weights = [
            torch.randn(columns, depth, device="cuda").bfloat16() / depth**0.5
            for _ in range(COPIES)
        ]
        every = torch.randn(max(ROWS), depth, device="cuda").bfloat16()
        expected = products.product(every, weights[0])
        for count in ROWS:
            rows = every[-count:]
            times = {
                system: _timed(partial(multiply, rows), weights)
                for system, multiply in SYSTEMS.items()
            }
            for system, timing in times.items():
                layers.setdefault((count, system), []).append(timing)
            label = f"product.{name}.{count}_rows"
            ours = products.product(rows, weights[0])
            differ = _rows_that_differ(ours, expected[-count:])
            yield Figure(f"{label}.rows_that_differ", differ, "rows", None, 0.0)
            text = ", ".join(f"{system} {each.microseconds:.1f}" for system, each in times.items())
            console.print(f"{label}: {text} us, {differ=}")
            for system, timing in times.items():
                yield time_figure(f"{label}.{system}", timing)
            yield from _tile_figures(label, rows, weights)
        del weights, every, expected
    for count in ROWS:
        label = f"product.layer.{count}_rows"
        total = {system: sum(each.median_s for each in layers[count, system]) for system in SYSTEMS}
        yield Figure(f"{label}.us", total["product"] * 1e6, "microseconds")
        for system in list(SYSTEMS)[1:]:
            ratio, base = total[system] / total["product"], round(total[system] * 1e6, 2)
            console.print(f"{label}: {ratio:.2f} times as fast as {system}")
            yield Figure(f"{label}.vs_{system}", ratio, "times as fast", None, base)


def _tile_figures(label: str, rows: torch.Tensor, weights: list[torch.Tensor]) -> Iterator[Figure]:
    """Time every tile that choose_tile() has for this number of rows."""
    chosen = products.tiles_of(rows.device)
    is_few = len(rows) <= products.FEW_ROWS
    tiles = (chosen.narrow, chosen.plain) if is_few else chosen.wide
    best = []
    for tile in tiles:
        timing = _timed(lambda w, tile=tile: products.multiply(rows, w, None, tile), weights)
        best.append((timing.microseconds, f"{tile.rows}x{tile.columns}"))
        yield time_figure(f"{label}.tile_{tile.rows}x{tile.columns}", timing)
    console.print("  tiles: " + ", ".join(f"{tile} {us:.1f}" for us, tile in sorted(best)))


def _timed(call: Callable[[torch.Tensor], torch.Tensor], weights: list[torch.Tensor]) -> Timing:
    return measure([partial(call, weight) for weight in weights], replays=11)


def _rows_that_differ(ours: torch.Tensor, expected: torch.Tensor) -> int:
    """Compare rows of products [rows, N], or of attention [batch, queries, heads, head size]."""
    differ = ours != expected
    return int((differ if ours.ndim == 2 else differ.flatten(2)).any(dim=-1).sum())


if __name__ == "__main__":
    main()
