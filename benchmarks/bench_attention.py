"""Time KVSpec's attention and encode kernels, and compare attention with FlashInfer on one GPU.

usage: python benchmarks/bench_attention.py [--only PART,...] [--kernels NAME] [--out PATH]

--kernels says which kernels of drafts and verifications are measured, as --kvspec-kernels does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

import torch
from acceptance.report import Figure, write_json
from attention import encode_cases, flashinfer_runs, kvspec_runs
from attention.shapes import ARITHMETIC_SHAPES, GRID, KV_HEADS, MAIN
from attention.timing import Timing, copy_bandwidth, measure, time_figure
from rich.console import Console

from kvspec_kernels.ops.attention_plan import Backend

ROOT = Path(__file__).resolve().parents[1]
LAYERS = 32
VERIFY_TOKENS = (1, 4, 16, 64)
PARTS = ("draft", "arithmetic", "grid", "verify", "encode")
# Not measured unless it is named.
ROTATED = "rotated"
# Rotated anchors take so long to encode that more would take minutes.
ROTATED_REPLAYS = 5
# Parts that choose between kernels.
PARTS_BY_KERNELS = ("draft", "verify")
RESULT_OF: Mapping[Backend, str] = {
    "auto": "attention_h200.json",
    "cuda": "attention_cuda.json",
    "triton": "attention_triton.json",
}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

console = Console(width=110)


def main() -> None:
    args = parse_arguments()
    bandwidth = copy_bandwidth()
    figures = [Figure("copy.tbps", bandwidth / 1e12, "TB/s read plus written")]
    if "draft" in args.only:
        figures += draft_figures(bandwidth, args.kernels)
    if "arithmetic" in args.only:
        figures += arithmetic_figures()
    if "grid" in args.only:
        figures += grid_figures()
    if "verify" in args.only:
        figures += verify_figures(bandwidth, args.kernels)
    if "encode" in args.only:
        figures += encode_figures(bandwidth)
    if ROTATED in args.only:
        figures += rotated_figures(bandwidth)
    settings = {
        "kernels": args.kernels,
        "geometry": "32 query heads, 8 KV heads, head size 128, page 64, BF16 queries",
        "baseline": "FlashInfer paged decode with tensor cores; for verify its paged prefill, the "
        "faster of back ends fa2 and fa3",
        "timing": "median of CUDA graph replays over inputs that rotate past the L2 cache",
        "spread": "half the distance between the outer deciles",
    }
    write_json(args.out, "attention", torch.device("cuda"), settings, figures, commit=args.commit)
    console.print(f"written: {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        default=",".join(PARTS),
        help=f"parts to measure, separated by commas (default: all of {','.join(PARTS)})",
    )
    parser.add_argument("--kernels", choices=get_args(Backend), default="auto")
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    parser.add_argument("--out", type=Path, help="default: by --kernels, in benchmarks/results")
    args = parser.parse_args()
    args.out = args.out or ROOT / "benchmarks" / "results" / RESULT_OF[args.kernels]
    args.only = args.only.split(",")
    if unknown := set(args.only) - {*PARTS, ROTATED}:
        parser.error(
            f"--only has the unknown parts {', '.join(sorted(unknown))}: choose from "
            f"{', '.join((*PARTS, ROTATED))}"
        )
    others = set(args.only) - set(PARTS_BY_KERNELS)
    if args.kernels != "auto" and others:
        parser.error(f"--kernels does not apply to {', '.join(sorted(others))}: name --only parts")
    return args


def draft_figures(bandwidth: float, kernels: Backend) -> list[Figure]:
    """Time draft attention at 16 x 32768. Return its time, its share of the copy bandwidth, and the
    ratio of FlashInfer's time to it."""
    base = measure(flashinfer_runs.decode_calls(MAIN, BF16))
    fp8 = measure(flashinfer_runs.decode_calls(MAIN, FP8))
    name = f"attn.draft.{MAIN}"
    figures = [
        time_figure(f"{name}.flashinfer_bf16", base),
        time_figure(f"{name}.flashinfer_fp8", fp8),
    ]
    best: tuple[float, Figure, Figure] | None = None
    for codec, settings in kvspec_runs.CODECS.items():
        ours = measure(kvspec_runs.draft_calls(settings, MAIN, backend=kernels))
        nbytes = MAIN.num_pages * KV_HEADS * kvspec_runs.record_bytes(settings)
        share = _share(f"{name}.{codec}", nbytes, ours, bandwidth)
        ratio = _ratio(f"{name}.{codec}.vs_flashinfer_bf16", base, ours)
        figures += [time_figure(f"{name}.{codec}", ours), share, ratio]
        layers = Figure(
            f"{name}.{codec}.ms_32_layers", ours.median_s * LAYERS * 1e3, "ms", None, 5.8
        )
        figures.append(layers)
        if best is None or ratio.value > best[0]:
            best = (ratio.value, ratio, share)
        _show(f"draft {MAIN} {codec}", ours, base)
    assert best is not None
    for figure, suffix in ((best[1], "vs_flashinfer_bf16"), (best[2], "bandwidth_share")):
        figures.append(
            Figure(f"{name}.{suffix}", figure.value, figure.unit, figure.spread, figure.baseline)
        )
    return figures + _two_bit_figures(base, kernels)


def _two_bit_figures(base: Timing, kernels: Backend) -> list[Figure]:
    """Time draft attention at the same shape from 2-bit anchors. A further figure, without a codec
    in its name, repeats the better ratio."""
    name = f"attn.draft2bit.{MAIN}"
    figures, ratios = [], []
    for codec, settings in kvspec_runs.TWO_BIT_CODECS.items():
        ours = measure(kvspec_runs.draft_calls(settings, MAIN, backend=kernels))
        ratios.append(_ratio(f"{name}.{codec}.vs_flashinfer_bf16", base, ours))
        figures += [time_figure(f"{name}.{codec}", ours), ratios[-1]]
        _show(f"2-bit draft {MAIN} {codec}", ours, base)
    best = max(ratios, key=lambda figure: figure.value)
    suffix = "vs_flashinfer_bf16"
    return [*figures, Figure(f"{name}.{suffix}", best.value, best.unit, best.spread, best.baseline)]


def arithmetic_figures() -> list[Figure]:
    """Compare uniform4's draft attention on integer codes with draft attention in fp16."""
    figures = []
    for shape in ARITHMETIC_SHAPES:
        times = {}
        for arithmetic in ("fp16", "int8"):
            calls = kvspec_runs.draft_calls(kvspec_runs.CODECS["uniform4"], shape, arithmetic)
            times[arithmetic] = measure(calls)
            torch.cuda.empty_cache()
        name = f"attn.draft.{shape}.uniform4.int8_vs_fp16"
        figures.append(_ratio(name, times["fp16"], times["int8"]))
        console.print(f"draft {shape}: int8 is {figures[-1].value:.2f} times as fast as fp16")
    return figures


def grid_figures() -> list[Figure]:
    """Compare draft attention at every shape with the faster of FlashInfer BF16 and fp8. The last
    figure is the least ratio."""
    figures, ratios = [], []
    for shape in GRID:
        bases = [measure(flashinfer_runs.decode_calls(shape, dtype)) for dtype in (BF16, FP8)]
        base = min(bases, key=lambda timing: timing.median_s)
        torch.cuda.empty_cache()
        for codec, settings in kvspec_runs.CODECS.items():
            ours = measure(kvspec_runs.draft_calls(settings, shape))
            ratio = _ratio(f"attn.draft.grid.{shape}.{codec}.vs_flashinfer", base, ours)
            figures.append(ratio)
            ratios.append(ratio)
            _show(f"draft {shape} {codec}", ours, base)
            torch.cuda.empty_cache()
    worst = min(ratios, key=lambda figure: figure.value)
    name = "attn.draft.grid.min_vs_flashinfer"
    return [*figures, Figure(name, worst.value, worst.unit, worst.spread, worst.baseline)]


def verify_figures(bandwidth: float, kernels: Backend) -> list[Figure]:
    """Compare verify attention, several query tokens over 8-bit pages, with FlashInfer's BF16 paged
    prefill and with the copy bandwidth."""
    figures = []
    for num_new in VERIFY_TOKENS:
        bases = {}
        for backend in ("fa2", "fa3"):
            bases[backend] = measure(flashinfer_runs.append_calls(MAIN, num_new, backend))
            name = f"attn.verify{num_new}.{MAIN}.flashinfer_bf16_{backend}"
            figures.append(time_figure(name, bases[backend]))
            torch.cuda.empty_cache()
        base = min(bases.values(), key=lambda timing: timing.median_s)
        best: Figure | None = None
        for codec, settings in kvspec_runs.CODECS.items():
            ours = measure(kvspec_runs.verify_calls(settings, MAIN, num_new, kernels))
            name = f"attn.verify{num_new}.{MAIN}"
            ratio = _ratio(f"{name}.{codec}.vs_flashinfer_bf16", base, ours)
            nbytes = MAIN.num_pages * KV_HEADS * kvspec_runs.refined_bytes(settings)
            share = _share(f"{name}.{codec}", nbytes, ours, bandwidth)
            figures += [time_figure(f"{name}.{codec}", ours), share, ratio]
            if best is None or ratio.value > best.value:
                best = ratio
            _show(f"verify {num_new} {MAIN} {codec}", ours, base)
            torch.cuda.empty_cache()
        assert best is not None
        name = f"attn.verify{num_new}.{MAIN}.vs_flashinfer_bf16"
        figures.append(Figure(name, best.value, best.unit, best.spread, best.baseline))
    return figures


def encode_figures(bandwidth: float) -> list[Figure]:
    """Time the encoding of whole pages, and the append of one token per request."""

    def timer(call: Callable[[], object]) -> tuple[float, float]:
        return _seconds(measure([call] * 4))

    figures, shares = [], []
    encoded = encode_cases.bench_encode(timer)
    for case, values in encoded.items():
        relative = values["spread_ms"] / values["ms"]
        share = values["moved_tbps"] * 1e12 / bandwidth
        figures.append(_encoded(case, values))
        name = f"encode.{case}.bandwidth_share"
        shares.append(Figure(name, share, "of copy bandwidth", share * relative, 1.0))
        console.print(
            f"encode {case}: {values['tbps']:.2f} TB/s read, {values['moved_tbps']:.2f} TB/s moved"
        )
    slowest = min(figures, key=lambda figure: figure.value)
    figures += [Figure("encode.tbps", slowest.value, slowest.unit, slowest.spread, 1.5), *shares]
    append_s, spread_s = encode_cases.bench_append(timer)
    console.print(f"append: {append_s * 1e6:.2f} us a layer")
    name = "append.us_per_layer"
    figures.append(Figure(name, append_s * 1e6, "microseconds", spread_s * 1e6, 6.0))
    return figures


def rotated_figures(bandwidth: float) -> list[Figure]:
    """Time draft attention from rotated anchors, which Triton reads, beside anchors of uniform4,
    and the encoding of both."""
    base = measure(flashinfer_runs.decode_calls(MAIN, BF16))
    name, figures = f"attn.draft.{MAIN}", [time_figure(f"attn.draft.{MAIN}.flashinfer_bf16", base)]
    codecs = kvspec_runs.ROTATED_CODECS | {"uniform4": kvspec_runs.CODECS["uniform4"]}
    for codec, settings in codecs.items():
        ours = measure(kvspec_runs.draft_calls(settings, MAIN))
        nbytes = MAIN.num_pages * KV_HEADS * kvspec_runs.record_bytes(settings)
        figures += [
            time_figure(f"{name}.{codec}", ours),
            _share(f"{name}.{codec}", nbytes, ours, bandwidth),
            _ratio(f"{name}.{codec}.vs_flashinfer_bf16", base, ours),
        ]
        _show(f"draft {MAIN} {codec}", ours, base)
        torch.cuda.empty_cache()

    def timer(call: Callable[[], object]) -> tuple[float, float]:
        return _seconds(measure([call], ROTATED_REPLAYS))

    for case, values in encode_cases.bench_encode(timer, codecs, ("exact",)).items():
        figures.append(_encoded(case, values))
        console.print(f"encode {case}: {values['tbps']:.2f} TB/s read")
    return figures


def _seconds(timing: Timing) -> tuple[float, float]:
    return timing.median_s, timing.spread_s


def _encoded(case: str, values: Mapping[str, float]) -> Figure:
    tbps, relative = values["tbps"], values["spread_ms"] / values["ms"]
    return Figure(f"encode.{case}.tbps", tbps, "TB/s of BF16 read", tbps * relative)


def _ratio(name: str, base: Timing, ours: Timing) -> Figure:
    ratio = base.median_s / ours.median_s
    relative = base.spread_s / base.median_s + ours.spread_s / ours.median_s
    return Figure(name, ratio, "times as fast", ratio * relative, round(base.microseconds, 2))


def _share(name: str, nbytes: int, ours: Timing, bandwidth: float) -> Figure:
    share = nbytes / ours.median_s / bandwidth
    spread = share * ours.spread_s / ours.median_s
    return Figure(f"{name}.bandwidth_share", share, "of copy bandwidth", spread, 1.0)


def _show(what: str, ours: Timing, base: Timing) -> None:
    console.print(
        f"{what}: {ours.microseconds:.1f} us, FlashInfer {base.microseconds:.1f} us, "
        f"{base.median_s / ours.median_s:.2f}x"
    )


if __name__ == "__main__":
    main()
