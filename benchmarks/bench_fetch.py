"""Measure the prefetch of residuals from host memory during drafting, and the slowdown of drafts.

usage: python benchmarks/bench_fetch.py [--out PATH]

A draft step of an 8B shape is one CUDA graph for 16 requests of 32K tokens: attention on anchors,
and the matrix products of every layer. During each step, the benchmark fetches as many pages as the
link can move in that time. It uses the server's own copies (kv/host_copies.py), with their fences.

Names with .packed: residuals are packed in host memory (--kvspec-exact-residual), and unpacked on
the GPU. Values are normally distributed. pages_per_s: pages whose raw residuals are in GPU memory.
enqueue_ms: how long the CPU takes to enqueue a fetch. put_pages_per_s: write-through to the host.
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
from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.kv.copy_streams import make_copy_stream, make_copy_streams
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.host_store import HostStore, RawStore
from sglang_kvspec.kv.packed_store import PackedStore
from sglang_kvspec.kv.record_pool import RecordPool

ROOT = Path(__file__).resolve().parents[1]
LAYERS = 32
RESIDUAL_BYTES = 2 * PAGE_SIZE * HEAD_DIM * 2
STORE_PAGES, CACHE_PAGES, DIFFERENT_PAGES = 512, 256, 16
STEPS, ROUNDS = 20, 9

console = Console(width=110)


class Link:
    """Residual store and residual cache. Fetches go through the pages of the store and the slots of
    the cache in turn."""

    def __init__(self, device: torch.device, *, packs: bool) -> None:
        """packs: the store holds packed residuals."""
        self.cache = RecordPool(LAYERS, CACHE_PAGES, KV_HEADS, RESIDUAL_BYTES, device, by_page=True)
        if packs:
            store: HostStore = self._packed_store(device)
        else:
            host = (KV_HEADS, RESIDUAL_BYTES, torch.device("cpu"))
            rows = RecordPool(LAYERS, STORE_PAGES, *host, pinned=True, by_page=True)
            store = RawStore(self.cache, rows)
        self.copies = HostCopies(store, make_copy_streams(device))
        self.page_bytes = self.cache.page(0).nbytes
        self._fetched = 0
        # Fills the store, and tells it which records do not fit.
        self.put(STORE_PAGES)
        self.link_bytes = store.link_bytes(range(STORE_PAGES)) / STORE_PAGES

    def _packed_store(self, device: torch.device) -> PackedStore:
        """Return an empty store, beside anchors of the pages in the cache. Pages with equal places
        in groups of DIFFERENT_PAGES are equal."""
        codec = make_codec(
            "uniform4",
            target="exact",
            page_size=PAGE_SIZE,
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
            packs=True,
        )
        assert codec.packed is not None, "packs=True gives a packed form"
        anchors = RecordPool(LAYERS, STORE_PAGES, KV_HEADS, codec.anchor_bytes, device)
        for first in range(DIFFERENT_PAGES):
            shape = (2, LAYERS, PAGE_SIZE, KV_HEADS, HEAD_DIM)
            k, v = torch.randn(shape, device=device).bfloat16()
            encoded = codec.encode(k, v)
            for pool, records in ((anchors, encoded.anchor), (self.cache, encoded.residual)):
                places = torch.arange(first, pool.layer(0).shape[0], DIFFERENT_PAGES, device=device)
                pool.write_pages(places, records.expand(len(places), *records.shape))
        link = make_copy_stream(device)
        form = codec.packed
        return PackedStore(self.cache, lambda: anchors, form, STORE_PAGES, link, pinned=True)

    def fetch(self, num_pages: int, *, by_layer: bool) -> None:
        pairs = self._turns(num_pages)
        if by_layer:
            self.copies.fetch_by_layer(pairs)
        else:
            self.copies.fetch(pairs)

    def put(self, num_pages: int) -> None:
        slots = dict(self._turns(num_pages))
        self.copies.copy_out(list(slots.items()))
        self.copies.settle(slots, slots.__getitem__)

    def _turns(self, num_pages: int) -> list[tuple[int, int]]:
        turns = range(self._fetched, self._fetched + num_pages)
        self._fetched += num_pages
        return [(turn % STORE_PAGES, turn % CACHE_PAGES) for turn in turns]


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
    draft = draft_step(args.codec)
    alone = timed(draft)
    figures = [Figure("fetch.draft_step_ms", alone[0] * 1e3, "ms, without fetches", alone[1] * 1e3)]
    for form in ("", ".packed"):
        link = Link(device, packs=bool(form))
        for way in ("", ".by_layer"):
            figures += measured(link, draft, alone[0], form + way, by_layer=bool(way))
        figures.append(put_figure(link, form))
    settings = {
        "shape": f"{MAIN}, {LAYERS} layers, {KV_HEADS} KV heads of {HEAD_DIM}, {args.codec}",
        "page": f"{link.page_bytes / 2**20:g} MiB, exact residuals of all layers",
        "packed_page": f"{link.link_bytes / 2**20:g} MiB on the link",
        "spread": f"half the distance between the outer deciles of {ROUNDS} runs of {STEPS} steps",
        "baseline": "for rates: the same fetches while nothing else runs",
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

    # A graph has only the addresses of what it reads.
    reads = (attend, weights, rows)

    def replay(_keeps: object = reads) -> None:
        graph.replay()

    return replay


def measured(
    link: Link, draft: Callable[[], None], alone_s: float, name: str, *, by_layer: bool
) -> list[Figure]:
    """Return figures of one way to fetch: rates alone, rates while drafting, and slowdown of the
    draft step."""
    num_pages = CACHE_PAGES // 4

    def fetch_alone() -> None:
        link.fetch(num_pages, by_layer=by_layer)

    free_s, free_spread_s = timed(fetch_alone)
    enqueue_s = enqueue_seconds(fetch_alone)
    # As many pages as keep the link busy for a draft step.
    a_step = max(1, int(alone_s / free_s * num_pages))

    def both() -> None:
        link.fetch(a_step, by_layer=by_layer)
        draft()

    both_s, both_spread_s = timed(both)
    free_rate, rate = num_pages / free_s, a_step / both_s
    gb, share = link.link_bytes / 1e9, both_spread_s / both_s
    free_share = free_spread_s / free_s
    return [
        Figure(f"fetch{name}.alone_gbps", free_rate * gb, "GB/s", free_rate * gb * free_share),
        Figure(f"fetch{name}.gbps", rate * gb, "GB/s while drafting", rate * gb * share,
               free_rate * gb),
        Figure(f"fetch{name}.alone_pages_per_s", free_rate, "pages/s", free_rate * free_share),
        Figure(f"fetch{name}.pages_per_s", rate, "pages/s while drafting", rate * share, free_rate),
        Figure(f"fetch{name}.enqueue_ms", enqueue_s * 1e3, f"ms of the CPU for {num_pages} pages"),
        Figure(
            f"fetch{name}.draft_slowdown",
            both_s / alone_s,
            f"x, with {a_step} pages fetched during a step",
            both_s / alone_s * share,
            alone_s * 1e3,
        ),
    ]  # fmt: skip


def put_figure(link: Link, name: str) -> Figure:
    """Return the rate at which pages are written through."""
    num_pages = CACHE_PAGES // 4
    seconds, spread_s = timed(lambda: link.put(num_pages))
    rate = num_pages / seconds
    return Figure(f"fetch{name}.put_pages_per_s", rate, "pages/s", rate * spread_s / seconds)


def enqueue_seconds(run: Callable[[], None]) -> float:
    """Return the seconds of the CPU for one run, while the GPU has nothing else to do: the median
    of ROUNDS."""
    seconds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(seconds)


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
