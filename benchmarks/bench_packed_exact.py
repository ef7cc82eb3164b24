"""Time the kernels of the packed exact residual on one GPU: one layer of 16 x 32K tokens of the 8B
geometry.

usage: python benchmarks/bench_packed_exact.py [--replays N] [--out PATH]

exactres.pack.tbps counts the bytes read: anchors and raw records. exactres.unpack.tbps counts
anchors and the used words of packed records. The baseline of each is a copy in PyTorch that moves
as many bytes, read plus written. Kernels whose bytes differ from the reference's are not timed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from acceptance.report import Figure, write_json
from attention.shapes import HEAD_DIM, KV_HEADS, MAIN, PAGE_SIZE
from attention.timing import REPLAYS, Timing, measure_in_turn, time_figure

from kvspec_kernels.formats import RecordLayout, Uniform4Settings, anchor_layout, residual_layout
from kvspec_kernels.ops.packed_exact import pack, unpack
from kvspec_kernels.packed_format import VERSION, PackedLayout
from kvspec_kernels.reference import exact, packed_exact, uniform4

ROOT = Path(__file__).resolve().parents[1]
DTYPE = torch.bfloat16
DISTINCT_PAGES = 64
LEAST_REPLAYS = 3


@dataclass(frozen=True)
class Records:
    """Anchors, raw and packed records of many pages, [records, bytes] uint8. used_bytes: header and
    used words of the packed ones, all together. fits: of each record."""

    anchors: torch.Tensor
    raw: torch.Tensor
    packed: torch.Tensor
    raw_v: torch.Tensor
    fits: torch.Tensor
    used_bytes: int
    layouts: tuple[RecordLayout, PackedLayout]


def main() -> None:
    args = parse_arguments()
    device = torch.device("cuda")
    records = make_records(MAIN.num_pages, device)
    check(records)
    times = measure_in_turn(
        {
            "pack": [lambda: pack(records.anchors, records.raw, *records.layouts)],
            "unpack": [
                lambda: unpack(records.anchors, records.packed, records.raw_v, *records.layouts)
            ],
            "copy_of_pack": [copy_call(sum(moved_bytes(records)["pack"]), device)],
            "copy_of_unpack": [copy_call(sum(moved_bytes(records)["unpack"]), device)],
        },
        args.replays,
    )
    settings = {
        "format_version": VERSION,
        "geometry": f"{KV_HEADS} KV heads, head size {HEAD_DIM}, page {PAGE_SIZE}, BF16",
        "tokens": f"{MAIN}, one layer",
        "pages": f"{DISTINCT_PAGES} random ones, repeated",
        "timing": f"median of {args.replays} CUDA graph replays; pack, unpack and copies alternate",
        "spread": "half the distance between the outer deciles",
        "baseline": "TB/s of a copy in PyTorch that moves as many bytes, by the same count",
    }
    write_json(
        args.out, "packed_exact", device, settings, figures(records, times), commit=args.commit
    )
    print(f"written: {args.out}")


def make_records(num_pages: int, device: torch.device) -> Records:
    """Return records of `num_pages` pages, of which DISTINCT_PAGES differ."""
    distinct = min(num_pages, DISTINCT_PAGES)
    settings = Uniform4Settings.for_page(PAGE_SIZE)
    layout = PackedLayout(PAGE_SIZE, HEAD_DIM, DTYPE)
    layouts = (anchor_layout(settings, PAGE_SIZE, HEAD_DIM), layout)
    raw_layout = residual_layout(settings, "exact", PAGE_SIZE, HEAD_DIM, DTYPE)
    k, v = (pages_like_kv(distinct, seed, device) for seed in (1, 2))
    anchors, _ = uniform4.encode(k, v, settings, layouts[0])
    values = uniform4.decode_anchor(anchors, settings, layouts[0], DTYPE)
    packed = packed_exact.encode(k, v, values, anchors, *layouts)
    times = num_pages // distinct
    used_bytes = layout.body_offset + 4 * packed.words.clamp_max(layout.body_words)
    return Records(
        *(part.flatten(0, 1).repeat(times, 1) for part in (
            anchors, exact.encode(k, v, raw_layout), packed.records)),
        packed.raw_v.repeat(times, 1),
        packed.fits.flatten().repeat(times),
        int(used_bytes.sum()) * times,
        layouts,
    )  # fmt: skip


def pages_like_kv(num_pages: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return pages [num_pages, P, H, D] whose channels differ in size and centre, as those of K
    do."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(KV_HEADS, HEAD_DIM, generator=generator) * 1.5
    centre = torch.randn(KV_HEADS, HEAD_DIM, generator=generator)
    noise = torch.randn(num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=generator)
    return (centre + noise * size.exp() / 4).to(device, DTYPE)


def check(records: Records) -> None:
    """Exit with a message unless both kernels give the bytes of the reference."""
    ours, fits = pack(records.anchors, records.raw, *records.layouts)
    if not (torch.equal(ours, records.packed) and torch.equal(fits, records.fits)):
        raise SystemExit("pack() does not give the records of the reference")
    del ours
    raw = unpack(records.anchors, records.packed, records.raw_v, *records.layouts)
    if not torch.equal(raw, records.raw):
        raise SystemExit("unpack() does not give back the raw records")


def moved_bytes(records: Records) -> dict[str, tuple[int, int]]:
    """Return the bytes that each kernel reads and writes."""
    return {
        "pack": (records.anchors.nbytes + records.raw.nbytes, records.packed.nbytes),
        "unpack": (records.anchors.nbytes + records.used_bytes, records.raw.nbytes),
    }


def copy_call(nbytes: int, device: torch.device):  # type: ignore[no-untyped-def]
    """Return a call that copies in PyTorch, and reads and writes `nbytes` together."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def figures(records: Records, times: dict[str, Timing]) -> list[Figure]:
    """Return the figures of each kernel. times: of both, and of their copies."""
    rows = []
    for name, (read, _) in moved_bytes(records).items():
        ours, copy = times[name], times[f"copy_of_{name}"]
        tbps, copy_tbps = (read / each.median_s / 1e12 for each in (ours, copy))
        spread = tbps * ours.spread_s / ours.median_s
        share = copy.median_s / ours.median_s
        rows += [
            Figure(f"exactres.{name}.tbps", tbps, "TB/s read", spread, round(copy_tbps, 3)),
            Figure(f"exactres.{name}.share_of_copy", share, "of a copy's speed", None, 1.0),
            time_figure(f"exactres.{name}", ours),
        ]
        print(f"{name}: {tbps:.3f} TB/s read, {share:.2f} of a copy, {ours.microseconds:.0f} us")
    unfit = 1 - records.fits.double().mean().item()
    return [*rows, Figure("exactres.kernels.fallback_share", unfit, "of records")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks" / "results" / "packed_exact_kernels.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    parser.add_argument("--replays", type=int, default=REPLAYS, help="of each CUDA graph")
    args = parser.parse_args()
    if args.replays < LEAST_REPLAYS:
        parser.error(f"--replays must be at least {LEAST_REPLAYS}, got {args.replays}")
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the kernels have no speed in Triton's interpreter")
    return args


if __name__ == "__main__":
    main()
