"""Measure the cost of a page of KV on the wire, for each mode of --kvspec-transfer but `split`.

Figures on the KV of real prompts are bits, errors, and tokens until a greedy answer over the
decoded cache differs. Coding is timed on one core. The anchors of `split` are measured for
comparison. The newest page of a prompt stays exact, as in bench_acceptance.py.

usage: python benchmarks/bench_wire_codecs.py [MODEL] [--prompts 24] [--length 2048] [--out PATH]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from acceptance import report
from acceptance.drafting import (
    TargetRun,
    accepted_lengths,
    attention_vnmse,
    draft_cache,
    target_run,
    through_anchor,
)
from acceptance.model import LayerCache, Llama
from acceptance.prompts import cut_prompts
from acceptance.report import Estimate, Figure
from rich.console import Console
from rich.table import Table

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.codecs.wire import PageGeometry, WireCodec, make_wire_codec
from sglang_kvspec.codecs.wire.cachegen import CacheGenWireCodec
from sglang_kvspec.kv.geometry import KVGeometry

ROOT = Path(__file__).resolve().parents[1]
PAGE_SIZE = 64
STEPS = 32
OTHER_BINS = ((0.5, 1.0, 1.5), (0.125, 0.25, 0.375))
# Shape of the page whose coding is timed: that of a small model.
TIMED = KVGeometry(num_layers=8, num_kv_heads=2, head_dim=64, page_size=64, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one codec.

    bits: per element of K or V, metadata included. k_vnmse, v_vnmse: error ||x - x'||² / ||x||² by
    layer [layers]. attention: the same error of attention outputs by prompt [prompts]. equal:
    accept length of STEPS greedy tokens by prompt [prompts].
    """

    name: str
    bits: float
    k_vnmse: torch.Tensor
    v_vnmse: torch.Tensor
    attention: torch.Tensor
    equal: torch.Tensor


@torch.inference_mode()
def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = Llama(args.model, device)
    prompts, sources = cut_prompts(args.model, args.prompts, args.length, args.seed)
    run = target_run(model, prompts, STEPS, prefill_batch=1)
    results = [
        measure(model, run, name, bits, cache) for name, bits, cache in approximations(model, run)
    ]
    figures = [figure for result in results for figure in figures_of(result)]
    speeds = [(codec.name, *times_of(codec)) for codec in shipped(TIMED)]
    figures += speed_figures(speeds)
    settings = {
        "model": args.model.name,
        "prompts": args.prompts,
        "prompt_len": args.length,
        "prompts_from": sources,
        "seed": args.seed,
        "page_size": PAGE_SIZE,
        "kv_dtype_of_errors": "float32",
        "page_of_times": str(TIMED),
    }
    report.write_json(args.out, "wire_codecs", device, settings, figures)
    print_results(results)
    print_speeds(speeds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_model = ROOT.parent / "shared" / "models" / "eval-31m"
    parser.add_argument(
        "model", type=Path, nargs="?", default=default_model, help="folder of a Hugging Face model"
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--length", type=int, default=2048, help="tokens per prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "wire_codecs.json"
    )
    args = parser.parse_args()
    if args.prompts < 2 or args.length < 2 * PAGE_SIZE or args.length % PAGE_SIZE:
        parser.error(
            f"--prompts must be at least 2, got {args.prompts}; --length must be a multiple of "
            f"{PAGE_SIZE} and at least {2 * PAGE_SIZE}, got {args.length}"
        )
    return args


def shipped(geometry: PageGeometry) -> list[WireCodec]:
    return [make_wire_codec(name, geometry) for name in ("full", "int8", "int4", "cachegen")]


def approximations(model: Llama, run: TargetRun) -> Iterator[tuple[str, float, LayerCache]]:
    """Yield (name, bits per element, decoded cache of the run) for each codec."""
    shape = model.shape
    for name in ("log4", "uniform4"):
        anchors = make_codec(
            name,
            target="int8",
            page_size=PAGE_SIZE,
            head_dim=shape.head_dim,
            dtype=torch.float32,
        )
        cache = draft_cache(run, through_anchor(anchors), PAGE_SIZE)
        yield f"{name} anchor", anchors.anchor_bits_per_element, cache
    geometry = KVGeometry(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, PAGE_SIZE, torch.float32
    )
    for codec in shipped(geometry):
        yield codec.name, *wire_cache(run, codec)
    for bins in OTHER_BINS:
        bits, cache = wire_cache(run, CacheGenWireCodec(geometry, bins))
        yield f"cachegen {'/'.join(map(str, bins))}", bits, cache


def wire_cache(run: TargetRun, codec: WireCodec) -> tuple[float, LayerCache]:
    """Return bits per element and the run's cache, with all prompt pages but the newest passed
    through `codec`. All layers of a page are encoded at once."""
    k, v = (torch.stack(parts) for parts in zip(*run.cache, strict=True))
    bits = elements = 0
    for row in range(k.shape[1]):
        for start in range(0, encoded_tokens(run), PAGE_SIZE):
            place = (slice(None), row, slice(None), slice(start, start + PAGE_SIZE))
            page = [part[place].transpose(1, 2) for part in (k, v)]
            payload = codec.encode(*page)
            bits += 8 * payload.numel()
            elements += 2 * page[0].numel()
            for part, decoded in zip((k, v), codec.decode(payload), strict=True):
                part[place] = decoded.transpose(1, 2)
    return bits / elements, list(zip(k.unbind(), v.unbind(), strict=True))


def encoded_tokens(run: TargetRun) -> int:
    return (run.prompt_len // PAGE_SIZE - 1) * PAGE_SIZE


def measure(model: Llama, run: TargetRun, name: str, bits: float, cache: LayerCache) -> Measured:
    """Measure one codec. Overwrites the tokens after the prompt in `cache`."""
    errors = [
        torch.tensor(
            [
                vnmse(got[part], want[part], encoded_tokens(run))
                for got, want in zip(cache, run.cache, strict=True)
            ]
        )
        for part in (0, 1)
    ]
    attention = attention_vnmse(run, cache)
    return Measured(name, bits, *errors, attention, accepted_lengths(model, run, cache))


def vnmse(got: torch.Tensor, want: torch.Tensor, tokens: int) -> float:
    got, want = got[:, :, :tokens], want[:, :, :tokens]
    return ((got - want).square().sum() / want.square().sum()).item()


def times_of(codec: WireCodec, repeats: int = 100) -> tuple[float, float, float, float]:
    """Return the CPU seconds of this thread to encode a page and to decode it: for each, the median
    and half the interquartile range."""
    rng = torch.Generator().manual_seed(0)
    shape = (2, TIMED.num_layers, TIMED.page_size, TIMED.num_kv_heads, TIMED.head_dim)
    pages = torch.randn((8, *shape), generator=rng).to(TIMED.dtype)
    payloads = [codec.encode(*page) for page in pages]
    encode_s, decode_s = [], []
    for turn in range(repeats):
        at = turn % len(pages)
        started = time.thread_time()
        codec.encode(*pages[at])
        encoded = time.thread_time()
        codec.decode(payloads[at])
        decode_s.append(time.thread_time() - encoded)
        encode_s.append(encoded - started)
    return (*median_and_spread(encode_s), *median_and_spread(decode_s))


def median_and_spread(samples: list[float]) -> tuple[float, float]:
    low, middle, high = statistics.quantiles(samples, n=4)
    return middle, (high - low) / 2


def figures_of(result: Measured) -> Iterator[Figure]:
    unit = "||x-x'||²/||x||²"
    name = result.name.replace(" ", ".")
    yield Figure(f"wire.{name}.bits", result.bits, "bits/element")
    yield Figure(f"wire.{name}.k_vnmse", result.k_vnmse.mean().item(), unit)
    yield Figure(f"wire.{name}.v_vnmse", result.v_vnmse.mean().item(), unit)
    error, equal = Estimate.of(result.attention), Estimate.of(result.equal)
    yield Figure(f"wire.{name}.attention_vnmse", error.mean, unit, error.half_width)
    yield Figure(f"wire.{name}.equal_tokens", equal.mean, f"of {STEPS} tokens", equal.half_width)


def speed_figures(speeds: list[tuple[str, float, float, float, float]]) -> Iterator[Figure]:
    for name, encode_s, encode_spread, decode_s, decode_spread in speeds:
        yield Figure(f"wire.{name}.encode_ms", encode_s * 1e3, "CPU ms/page", encode_spread * 1e3)
        yield Figure(f"wire.{name}.decode_ms", decode_s * 1e3, "CPU ms/page", decode_spread * 1e3)


def print_results(results: list[Measured]) -> None:
    table = Table(title="KV of real prompts; bits include all metadata")
    for heading in ("codec", "bits", "K", "V", "attention", f"equal tokens of {STEPS}"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for r in results:
        errors = [f"{e.mean().item():.2e}" for e in (r.k_vnmse, r.v_vnmse, r.attention)]
        table.add_row(r.name, f"{r.bits:.2f}", *errors, str(Estimate.of(r.equal)))
    Console().print(table)


def print_speeds(speeds: list[tuple[str, float, float, float, float]]) -> None:
    table = Table(title="one core, a page of 8 layers x 64 tokens x 2 heads x 64, bf16")
    for heading in ("codec", "encode ms", "decode ms", "encode MB/s", "decode MB/s"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for name, encode_s, encode_spread, decode_s, decode_spread in speeds:
        times = [
            f"{seconds * 1e3:.2f} ± {spread * 1e3:.2f}"
            for seconds, spread in ((encode_s, encode_spread), (decode_s, decode_spread))
        ]
        rates = [f"{TIMED.plain_page_bytes / s / 1e6:,.0f}" for s in (encode_s, decode_s)]
        table.add_row(name, *times, *rates)
    Console().print(table)


if __name__ == "__main__":
    main()
