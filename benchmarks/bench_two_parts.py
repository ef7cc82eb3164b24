"""Time products of a few rows with weights in two parts on one GPU, against bf16 and 4 bits: the
four products of a layer of the 8B and of the 32B shape, and the layer in bf16 from its parts.

usage: python benchmarks/bench_two_parts.py [--quick] [--commit HASH] [--out PATH]

two.SHAPE.first: the first part alone, for drafts. two.SHAPE.both: the exact weight. Both have the
fastest tile of each product. two.SHAPE.int4: the product that a server drafts with. All are times
as fast as bf16, for the sum of the four products. A candidate with a wrong result is not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from acceptance.report import Figure, write_json
from attention.shapes import WEIGHTS
from attention.timing import Timing, measure, measure_in_turn, time_figure
from bench_int4_products import ROTATED, copied, copies_of, random_weight
from rich.console import Console
from two_parts.parts import BINADES, TwoParts, decode_first, encode
from two_parts.products import TILES, PackedParts, Tile, multiply, packed, reconstruct

from kvspec_kernels.ops import int4_products
from kvspec_kernels.reference import int4_weights

ROOT = Path(__file__).resolve().parents[1]
# [N, K] of the weights of a layer. The 32B shape is that of Qwen3-32B.
SHAPES = {
    "8b": WEIGHTS,
    "32b": {
        "qkv": (10240, 5120),
        "o": (5120, 8192),
        "gate_up": (51200, 5120),
        "down": (5120, 25600),
    },
}
ROWS = (1, 16, 48, 64, 128)
QUICK_ROWS = (1, 48)
REPLAYS, QUICK_REPLAYS = 11, 7
# Largest norm of the error of a result, relative to the result. The first part alone is three times
# as far from the exact product.
MOST_ERROR = 0.005
KINDS = ("bf16", "int4", "first", "both")

Calls = list[Callable[[], torch.Tensor]]
console = Console(width=120)


class Runs:
    """Times of every candidate, and what could not be timed."""

    def __init__(self) -> None:
        # By shape, product and number of rows, then by candidate.
        self.times: dict[tuple[str, str, int], dict[str, Timing]] = {}
        self.reconstructions: dict[tuple[str, str], Timing] = {}
        self.nbytes: dict[tuple[str, str], int] = {}
        self.listed: dict[str, dict[str, int]] = {}
        self.failures: dict[str, str] = {}

    def fail(self, name: str, reason: object) -> None:
        self.failures.setdefault(name, f"{reason}"[:300])
        console.print(f"{name} is left out: {f'{reason}'[:300]}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks" / "results" / "two_parts.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    parser.add_argument("--quick", action="store_true", help="fewer rows and replays")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    all_rows, replays = (QUICK_ROWS, QUICK_REPLAYS) if args.quick else (ROWS, REPLAYS)
    runs, begin = Runs(), time.perf_counter()
    for shape, weights in SHAPES.items():
        for name, size in weights.items():
            try:
                time_product(runs, shape, name, size, all_rows, replays)
            except Exception as error:
                runs.fail(f"{shape}.{name}", repr(error))
            torch.cuda.empty_cache()
            console.print(f"{shape}.{name}: {time.perf_counter() - begin:.0f} s so far")
    figures = [each for shape in SHAPES for each in layer_figures(runs, shape, all_rows)]
    figures += product_figures(runs)
    settings = {
        "weights": SHAPES,
        "format": f"12 bits, {BINADES} binades a row; smaller values are listed",
        "values": "normally distributed, rounded to bf16",
        "timing": "median of CUDA graph replays; candidates alternate",
        "rotated": f"copies of a weight of at least {ROTATED // 10**6} MB",
        "baseline": "torch.nn.functional.linear in bf16, microseconds",
        "spread": "half the distance between the outer deciles",
        "best": {
            f"{shape}.{name}.m{count}.{kind}": fastest(times, kind)[0]
            for (shape, name, count), times in runs.times.items()
            for kind in ("first", "both")
        },
        "listed": runs.listed,
        "left_out": runs.failures,
    }
    device = torch.device("cuda")
    write_json(args.out, "two_parts", device, settings, figures, commit=args.commit)
    console.print(f"written: {args.out}")


def time_product(
    runs: Runs,
    shape: str,
    name: str,
    size: tuple[int, int],
    all_rows: tuple[int, ...],
    replays: int,
) -> None:
    """Time one product by all candidates for each number of rows, and the reconstruction."""
    exact = (0.02 * torch.randn(size, device="cuda")).bfloat16()
    parts = encode(exact)
    ours = packed(parts)
    runs.nbytes[shape, name] = ours.nbytes
    runs.listed[f"{shape}.{name}"] = {
        "values": int((parts.small_at >= 0).sum()),
        "most_of_a_row": len(parts.small),
    }
    time_reconstruction(runs, shape, name, exact, ours, replays)
    dense = copies_of(exact, lambda w: w.clone(), exact.nbytes)
    all_ours = copies_of(ours, copied_parts, ours.nbytes)
    in_4_bits = random_weight(*size)
    packed_4_bits = int4_products.repacked(in_4_bits)
    all_4_bits = copies_of(packed_4_bits, copied, in_4_bits.nbytes)
    values = values_of(exact, parts, in_4_bits)
    for count in all_rows:
        x = torch.randn(count, size[1], device="cuda").bfloat16()
        candidates: dict[str, Calls] = {
            "bf16": [partial(F.linear, x, w) for w in dense],
            "int4": [partial(int4_products.product, x, w) for w in all_4_bits],
        }
        for tile in tiles_for(count):
            for kind in ("first", "both"):
                candidates[f"{kind}_{label(tile)}"] = [
                    partial(multiply, x, w, both=kind == "both", tile=tile) for w in all_ours
                ]
        right = {
            each: calls
            for each, calls in candidates.items()
            if is_right(runs, f"{shape}.{name}.m{count}.{each}", calls[0], x, values)
        }
        times = measure_in_turn(right, replays)
        runs.times[shape, name, count] = times
        text = ", ".join(f"{each} {timing.microseconds:.1f}" for each, timing in times.items())
        console.print(f"{shape}.{name}.m{count}: {text} us", markup=False)


def time_reconstruction(
    runs: Runs, shape: str, name: str, exact: torch.Tensor, ours: PackedParts, replays: int
) -> None:
    """Time the weight in bf16 from its parts, if all bits are right."""
    out = torch.empty_like(exact)
    reconstruct(ours, out)
    if not torch.equal(out.view(torch.int16), exact.view(torch.int16)):
        runs.fail(f"{shape}.{name}.reconstruct", "bits differ")
        return
    sources = copies_of(ours, copied_parts, ours.nbytes)
    calls = [partial(reconstruct, each, torch.empty_like(exact)) for each in sources]
    runs.reconstructions[shape, name] = measure(calls, replays)


def values_of(
    exact: torch.Tensor, parts: TwoParts, in_4_bits: int4_weights.Int4Weight
) -> dict[str, torch.Tensor]:
    """Return what each kind multiplies with, fp32."""
    values = {"bf16": exact.float(), "int4": int4_weights.decode(in_4_bits)}
    return values | {"first": decode_first(parts), "both": values["bf16"]}


def tiles_for(num_rows: int) -> list[Tile]:
    """Return the tiles with the fewest rows that take all rows at once."""
    least = min(tile.rows for tile in TILES if tile.rows >= num_rows)
    return [tile for tile in TILES if tile.rows == least]


def label(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}_{tile.num_stages}_{tile.programs}"


def kind_of(candidate: str) -> str:
    return candidate.partition("_")[0]


def copied_parts(ours: PackedParts) -> PackedParts:
    return PackedParts(*(part.clone() for part in ours[:6]), ours.num_inputs)


def is_right(
    runs: Runs,
    name: str,
    call: Callable[[], torch.Tensor],
    x: torch.Tensor,
    values: dict[str, torch.Tensor],
) -> bool:
    """Return True if a candidate runs twice, and multiplies by the value of its kind."""
    try:
        call()
        out = call()
        torch.cuda.synchronize()
    except Exception as error:
        runs.fail(name, repr(error))
        return False
    expected = x.float() @ values[kind_of(name.rpartition(".")[2])].t()
    error = float((out.float() - expected).norm() / expected.norm())
    if not error <= MOST_ERROR:
        runs.fail(name, f"wrong by {error:.2g} of the result")
        return False
    return True


def fastest(times: dict[str, Timing], kind: str) -> tuple[str, float]:
    """Return the fastest candidate of a kind and its microseconds; nothing and infinity if none was
    timed."""
    of_kind = {each: t.microseconds for each, t in times.items() if kind_of(each) == kind}
    name = min(of_kind, key=lambda each: of_kind[each], default="")
    return name, of_kind.get(name, float("inf"))


def layer_figures(runs: Runs, shape: str, all_rows: tuple[int, ...]) -> Iterator[Figure]:
    """Compare sums over the four products. A kind that lacks a product has no figure."""
    names = list(SHAPES[shape])
    plain = sum(2 * num_columns * num_inputs for num_columns, num_inputs in SHAPES[shape].values())
    if all((shape, name) in runs.nbytes for name in names):
        stored = sum(runs.nbytes[shape, name] for name in names)
        yield Figure(f"two.{shape}.layer_bytes", stored, "bytes", None, plain)
    if all((shape, name) in runs.reconstructions for name in names):
        us = sum(runs.reconstructions[shape, name].microseconds for name in names)
        console.print(f"two.{shape}.reconstruct: {us:.1f} us")
        yield Figure(f"two.{shape}.reconstruct.us", us, "microseconds")
    for count in all_rows:
        every = [runs.times.get((shape, name, count), {}) for name in names]
        sums = {kind: sum(fastest(times, kind)[1] for times in every) for kind in KINDS}
        for kind, us in sums.items():
            if us == float("inf"):
                continue
            ratio = sums["bf16"] / us
            console.print(f"two.{shape}.{kind}.m{count}: {us:.1f} us, {ratio:.2f} times as fast")
            yield Figure(f"two.{shape}.{kind}.m{count}.us", us, "microseconds")
            if kind != "bf16" and sums["bf16"] != float("inf"):
                base = round(sums["bf16"], 2)
                yield Figure(f"two.{shape}.{kind}.m{count}", ratio, "times as fast", None, base)


def product_figures(runs: Runs) -> Iterator[Figure]:
    """Return the times of each product, of every candidate."""
    for (shape, name), timing in runs.reconstructions.items():
        yield time_figure(f"two.{shape}.{name}.reconstruct", timing)
    for (shape, name, count), times in runs.times.items():
        for each, timing in times.items():
            yield time_figure(f"two.{shape}.{name}.m{count}.{each}", timing)


if __name__ == "__main__":
    main()
