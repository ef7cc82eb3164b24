"""Measure the prefetch of residuals from host memory during drafting, and the slowdown of drafts.

usage: python benchmarks/bench_fetch.py [--out PATH]

A draft step of an 8B shape is one CUDA graph for 16 requests of 32K tokens: attention on anchors,
and the matrix products of every layer. During each step, the benchmark fetches as many pages as the
link can move in that time. It uses the server's own copies (kv/host_copies.py), with their fences.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from acceptance.report import Figure, write_json
from attention.kvspec_runs import CODECS, draft_calls
from attention.shapes import HEAD_DIM, KV_HEADS, MAIN, PAGE_SIZE, WEIGHTS
from rich.console import Console

from kvspec_kernels.ops.capture import captured_graph
from sglang_kvspec.kv.copy_streams import make_copy_streams
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.host_store import RawStore
from sglang_kvspec.kv.record_pool import RecordPool

ROOT = Path(__file__).resolve().parents[1]
LAYERS = 32
RESIDUAL_BYTES = 2 * PAGE_SIZE * HEAD_DIM * 2
STORE_PAGES, CACHE_PAGES = 512, 256
STEPS, ROUNDS = 20, 9

console = Console(width=110)


class Link:
    """Residual store and residual cache. Fetches go through the pages of the store and the slots of
    the cache in turn."""

    def __init__(self, device: torch.device) -> None:
        shape = (KV_HEADS, RESIDUAL_BYTES, device)
        self.cache = RecordPool(LAYERS, CACHE_PAGES, *shape, by_page=True)
        host = (KV_HEADS, RESIDUAL_BYTES, torch.device("cpu"))
        self.store = RecordPool(LAYERS, STORE_PAGES, *host, pinned=True, by_page=True)
        self.copies = HostCopies(RawStore(self.cache, self.store), make_copy_streams(device))
        self.page_bytes = self.cache.page(0).nbytes
        self._fetched = 0

    def fetch(self, num_pages: int, *, by_layer: bool) -> None:
        turns = range(self._fetched, self._fetched + num_pages)
        self._fetched += num_pages
        pairs = [(turn % STORE_PAGES, turn % CACHE_PAGES) for turn in turns]
        if by_layer:
            self.copies.fetch_by_layer(pairs)
        else:
            self.copies.fetch(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", choices=CODECS, default="uniform4")
    parser.add_argument("--commit", default="", help="commit to record (default: what git reports)")
    default = ROOT / "benchmarks" / "results" / "fetch_h200.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    device = torch.device("cuda")
    draft, link = draft_step(args.codec), Link(device)
    alone = timed(draft)
    figures = [Figure("fetch.draft_step_ms", alone[0] * 1e3, "ms, without fetches", alone[1] * 1e3)]
    for name, by_layer in (("", False), (".by_layer", True)):
        figures += measured(link, draft, alone[0], name, by_layer=by_layer)
    settings = {
        "shape": f"{MAIN}, {LAYERS} layers, {KV_HEADS} KV heads of {HEAD_DIM}, {args.codec}",
        "page": f"{link.page_bytes / 2**20:g} MiB, exact residuals of all layers",
        "spread": f"half the distance between the outer deciles of {ROUNDS} runs of {STEPS} steps",
        "baseline": "for bandwidths: the same fetches while nothing else runs",
    }
    write_json(args.out, "fetch", device, settings, figures, commit=args.commit or None)
    for figure in figures:
        console.print(f"{figure.name}: {figure.value:.4g} {figure.unit}")
    console.print(f"written: {args.out}")


def draft_step(codec: str) -> Callable[[], None]:
    """Return a function that replays one draft step of all layers."""
    attend = draft_calls(CODECS[codec], MAIN)
    sizes = [(depth, num_columns) for num_columns, depth in WEIGHTS.values()]
    weights = [torch.randn(size, device="cuda").bfloat16() for size in sizes]
    rows = [torch.randn(MAIN.batch, size[0], device="cuda").bfloat16() for size in sizes]

    def step() -> None:
        for layer in range(LAYERS):
            attend[layer % len(attend)]()
            for row, weight in zip(rows, weights, strict=True):
                row @ weight

    step()
    torch.cuda.synchronize()
    with captured_graph() as graph:
        step()
    return graph.replay


def measured(
    link: Link, draft: Callable[[], None], alone_s: float, name: str, *, by_layer: bool
) -> list[Figure]:
    """Return figures of one way to fetch: bandwidth alone, bandwidth while drafting, and slowdown
    of the draft step."""
    num_pages = CACHE_PAGES // 4

    def fetch_alone() -> None:
        link.fetch(num_pages, by_layer=by_layer)

    free_s, free_spread_s = timed(fetch_alone)
    nbytes = num_pages * link.page_bytes
    free_gbps = nbytes / free_s / 1e9
    # As many pages as keep the link busy for a draft step.
    a_step = max(1, int(alone_s / free_s * num_pages))

    def both() -> None:
        link.fetch(a_step, by_layer=by_layer)
        draft()

    both_s, both_spread_s = timed(both)
    gbps = a_step * link.page_bytes / both_s / 1e9
    share = both_spread_s / both_s
    return [
        Figure(f"fetch{name}.alone_gbps", free_gbps, "GB/s", free_gbps * free_spread_s / free_s),
        Figure(f"fetch{name}.gbps", gbps, "GB/s while drafting", gbps * share, free_gbps),
        Figure(
            f"fetch{name}.draft_slowdown",
            both_s / alone_s,
            f"x, with {a_step} pages fetched during a step",
            both_s / alone_s * share,
            alone_s * 1e3,
        ),
    ]


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of one run: median over ROUNDS, and half the distance between the outer
    deciles. A round starts STEPS runs and waits until all their GPU work is done."""
    seconds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / STEPS)
    # The first round may still load or compile kernels.
    deciles = statistics.quantiles(seconds[1:], n=10)
    return statistics.median(seconds[1:]), (deciles[8] - deciles[0]) / 2


if __name__ == "__main__":
    main()
