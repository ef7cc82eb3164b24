"""Time products of a few rows with weights in 4 bits on one GPU, against bf16 and against SGLang's
Marlin: the four products of a layer of the 8B shape.

usage: python benchmarks/bench_int4_products.py [--quick] [--without-marlin] [--out PATH]

w4.products: the tile that the product chooses, in CUDA or Triton, as the server does. w4.triton:
the fastest of all tiles in Triton and numbers of programs for each product. w4.marlin: the faster
of its two types. All are times as fast as bf16, for the sum of the four products. A candidate with
a wrong result is not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from acceptance.report import Figure, write_json
from attention.shapes import WEIGHTS
from attention.timing import Timing, measure_in_turn, time_figure
from int4_products import marlin_runs
from rich.console import Console

from kvspec_kernels.jit.cuda_int4_products import CudaTile
from kvspec_kernels.ops import int4_products
from kvspec_kernels.ops.int4_products import TILES, Tile
from kvspec_kernels.reference.int4_weights import GROUP, Int4Weight, decode

ROOT = Path(__file__).resolve().parents[1]
ROWS = (1, 4, 8, 16, 32, 48, 64)
QUICK_ROWS = (1, 16, 48)
# Bytes of the copies of one weight, six times the L2 cache of an H100.
ROTATED = 300 * 10**6
REPLAYS, QUICK_REPLAYS = 11, 7
# Largest norm of the error of a result, relative to the result.
MOST_ERROR = 0.01

Calls = list[Callable[[], torch.Tensor]]
console = Console(width=120)


class Runs:
    """Times of every candidate, and what could not be timed."""

    def __init__(self) -> None:
        # By product and number of rows, then by candidate.
        self.times: dict[tuple[str, int], dict[str, Timing]] = {}
        # Candidate that choose_tile() names.
        self.chosen: dict[tuple[str, int], str] = {}
        self.failures: dict[str, str] = {}

    def fail(self, name: str, reason: object) -> None:
        self.failures.setdefault(name, f"{reason}"[:300])
        console.print(f"{name} is left out: {f'{reason}'[:300]}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks" / "results" / "int4_products.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    parser.add_argument("--quick", action="store_true", help="fewer rows and replays")
    parser.add_argument(
        "--without-marlin", action="store_true", help="do not compile Marlin, which takes minutes"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    all_rows = QUICK_ROWS if args.quick else ROWS
    runs, figures = Runs(), []
    types: tuple[str, ...] = ()
    if not args.without_marlin:
        try:
            seconds = marlin_runs.first_use_seconds(random_weight(256, 256))
            console.print(f"Marlin's first use: {seconds:.1f} s")
            figures.append(Figure("w4.marlin.first_use_seconds", seconds, "seconds"))
            types = marlin_runs.TYPES
        except Exception as error:
            runs.fail("marlin", repr(error))
    begin = time.perf_counter()
    for name, (num_columns, num_inputs) in WEIGHTS.items():
        try:
            time_product(runs, name, random_weight(num_columns, num_inputs), types, all_rows, args)
        except Exception as error:
            runs.fail(name, repr(error))
        torch.cuda.empty_cache()
        console.print(f"{name}: {time.perf_counter() - begin:.0f} s so far")
    figures += list(layer_figures(runs, all_rows))
    for (name, count), times in runs.times.items():
        figures += [time_figure(f"w4.{name}.m{count}.{each}", t) for each, t in times.items()]
    settings = {
        "weights": {name: list(shape) for name, shape in WEIGHTS.items()},
        "format": f"4-bit codes in groups of {GROUP}, bf16 scales; zeros bf16, of Marlin integers",
        "timing": "median of CUDA graph replays; candidates alternate",
        "rotated": f"copies of a weight of at least {ROTATED // 10**6} MB",
        "baseline": "torch.nn.functional.linear in bf16, microseconds",
        "spread": "half the distance between the outer deciles",
        "chosen": {f"{name}.m{count}": tile for (name, count), tile in runs.chosen.items()},
        "best": {
            f"{name}.m{count}": best_tile(times) for (name, count), times in runs.times.items()
        },
        "left_out": runs.failures,
    }
    device = torch.device("cuda")
    write_json(args.out, "int4_products", device, settings, figures, commit=args.commit)
    console.print(f"written: {args.out}")


def random_weight(num_columns: int, num_inputs: int) -> Int4Weight:
    codes = torch.randint(0, 256, (num_columns, num_inputs // 2), device="cuda", dtype=torch.uint8)
    scale = 0.01 + 0.01 * torch.rand(num_columns, num_inputs // GROUP, device="cuda")
    zero = -scale * (6 + 3 * torch.rand_like(scale))
    return Int4Weight(codes, scale.bfloat16(), zero.bfloat16(), num_inputs)


def time_product(
    runs: Runs,
    name: str,
    weight: Int4Weight,
    types: tuple[str, ...],
    all_rows: tuple[int, ...],
    args: argparse.Namespace,
) -> None:
    """Time one product by all candidates, for each number of rows."""
    value = decode(weight)
    dense = copies_of(value.bfloat16(), lambda w: w.clone(), value.numel() * 2)
    packed = int4_products.repacked(weight)
    ours = copies_of(packed, copied, weight.nbytes)
    marlin = {}
    for each in types:
        try:
            marlin[each] = marlin_runs.marlin_weight(weight, each)
        except Exception as error:
            runs.fail(f"marlin_{each}.{name}", repr(error))
    for count in all_rows:
        x = torch.randn(count, weight.num_inputs, device="cuda").bfloat16()
        candidates: dict[str, Calls] = {"bf16": [partial(F.linear, x, w) for w in dense]}
        chosen, tiles = tiles_for(x, len(value))
        for tile in tiles:
            multiply = int4_products.multiply
            if isinstance(tile, CudaTile):
                multiply = int4_products.multiply_in_cuda
            calls: Calls = [partial(multiply, x, w, None, tile) for w in ours]
            if is_right(runs, f"{label(tile)}.{name}.m{count}", calls[0], x, value):
                candidates[label(tile)] = calls
        runs.chosen[name, count] = label(chosen)
        for each, given in marlin.items():
            one = given.call(x)
            if is_right(runs, f"marlin_{each}.{name}.m{count}", one, x, given.value):
                more = range(1, num_copies(weight.nbytes))
                candidates[f"marlin_{each}"] = [one, *(given.call(x) for _ in more)]
        replays = QUICK_REPLAYS if args.quick else REPLAYS
        try:
            times = measure_in_turn(candidates, replays)
        except Exception as error:
            # Marlin is not ours, so a capture that fails is most likely its own.
            runs.fail(f"marlin.{name}.m{count}", repr(error))
            rest = {each: c for each, c in candidates.items() if not each.startswith("marlin")}
            times = measure_in_turn(rest, replays)
        runs.times[name, count] = times
        text = ", ".join(f"{each} {timing.microseconds:.1f}" for each, timing in times.items())
        console.print(f"{name}.m{count}: {text} us; chosen {label(chosen)}", markup=False)


def tiles_for(x: torch.Tensor, num_columns: int) -> tuple[Tile | CudaTile, list[Tile | CudaTile]]:
    """Return the tile that the product chooses, and all with a number of rows that fits."""
    chosen = int4_products.choose_tile(int4_products.chosen_tiles(x.device), len(x))
    fitting = [tile for tile in TILES if tile.rows == chosen.rows]
    fewer = [replace(tile, programs=n) for tile in fitting for n in range(1, tile.programs)]
    in_cuda = int4_products.choose_cuda_tile(x, num_columns)
    if in_cuda is None:
        return chosen, [*fitting, *fewer]
    return in_cuda, [in_cuda, *fitting, *fewer]


def is_right(
    runs: Runs, name: str, call: Callable[[], torch.Tensor], x: torch.Tensor, value: torch.Tensor
) -> bool:
    """Return True if a candidate runs twice, and multiplies by this value [N, K]."""
    try:
        call()
        out = call()
        torch.cuda.synchronize()
    except Exception as error:
        runs.fail(name, repr(error))
        return False
    expected = x.float() @ value.t()
    error = float((out.float() - expected).norm() / expected.norm())
    if not error <= MOST_ERROR:
        runs.fail(name, f"wrong by {error:.2g} of the result")
        return False
    return True


def layer_figures(runs: Runs, all_rows: tuple[int, ...]) -> Iterator[Figure]:
    """Compare sums over the four products. A system that lacks a product has no figure."""
    for count in all_rows:
        if any((name, count) not in runs.times for name in WEIGHTS):
            continue
        sums: dict[str, float] = {}
        every = [(runs.times[name, count], runs.chosen[name, count]) for name in WEIGHTS]
        base = sum(times["bf16"].microseconds for times, _ in every)
        if all(chosen in times for times, chosen in every):
            sums["products"] = sum(times[chosen].microseconds for times, chosen in every)
        if all(best_tile(times) for times, _ in every):
            best = (times[best_tile(times)].microseconds for times, _ in every)
            sums["triton"] = sum(best)
        for each in marlin_runs.TYPES:
            if all(f"marlin_{each}" in times for times, _ in every):
                us = sum(times[f"marlin_{each}"].microseconds for times, _ in every)
                sums[f"marlin_{each}"] = us
        types = [us for name, us in sums.items() if name.startswith("marlin_")]
        if types:
            sums["marlin"] = min(types)
        yield Figure(f"w4.bf16.m{count}.us", base, "microseconds")
        for name, us in sums.items():
            console.print(f"w4.{name}.m{count}: {us:.1f} us, {base / us:.2f} times as fast")
            yield Figure(f"w4.{name}.m{count}.us", us, "microseconds")
            yield Figure(f"w4.{name}.m{count}", base / us, "times as fast", None, round(base, 2))


def best_tile(times: dict[str, Timing]) -> str:
    """Return the fastest tile in Triton, or nothing if none was timed."""
    tiles = [name for name in times if name.startswith("tile_") and "_cuda_" not in name]
    return min(tiles, key=lambda name: times[name].median_s, default="")


def label(tile: Tile | CudaTile) -> str:
    if isinstance(tile, CudaTile):
        return f"tile_{tile.rows}x{tile.columns}_cuda_{tile.programs}"
    way = "decoded" if tile.decoded else "scaled"
    return f"tile_{tile.rows}x{tile.columns}_{way}_{tile.programs}"


def copied(packed: int4_products.PackedWeight) -> int4_products.PackedWeight:
    parts = (packed.words.clone(), packed.affine.clone(), packed.arrived.clone())
    return int4_products.PackedWeight(*parts, packed.num_inputs)


def copies_of(first: Any, copy: Callable[[Any], Any], nbytes: int) -> list[Any]:
    """Return copies of a weight, ROTATED bytes in all."""
    return [first, *(copy(first) for _ in range(1, num_copies(nbytes)))]


def num_copies(nbytes: int) -> int:
    """Return how many weights of this size have ROTATED bytes in all."""
    return -(-ROTATED // nbytes)


if __name__ == "__main__":
    main()
